"""The trainer's own record of what each step was fed, to be held against the ledger's history.

One JSON line a step, synced before the ledger is told. A step that is run again after a restart has a later line; the
last line of a step is the one whose weights live on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from services.trainer.batch import Batch


class TrainingRecord:
    """Appends to trained.jsonl: {"step", "digest", "sample_ids"}."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, batch: Batch) -> None:
        """Durable when it returns."""
        is_new = not self._path.exists()
        line = {"step": step, "digest": batch.digest.hex(), "sample_ids": [s.sample_id for s in batch.samples]}
        with self._path.open("ab+") as file:
            file.write(b"" if _ends_a_line(file) else b"\n")  # a kill has cut the line before
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)


def _ends_a_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _sync_folder(folder: Path) -> None:
    """A new file's name is durable when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
