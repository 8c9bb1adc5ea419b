"""Rows of JSON, one a line, synced."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from services.trainer.files.durable import sync


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Durable when it returns. A line that a kill has cut stays a line of its own."""
    is_new = not path.exists()
    with path.open("ab+") as file:
        file.write(b"" if _ends_a_line(file) else b"\n")
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def _ends_a_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
