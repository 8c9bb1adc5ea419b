"""The trainer's own record of what each step was fed, to be held against the ledger's history.

One JSON line a step, synced before the ledger is told. A step that is run again after a restart has a later line; the
last line of a step is the one whose weights live on.
"""

from __future__ import annotations

from pathlib import Path

from services.trainer.files.durable_rows import append_rows
from services.trainer.plan.batch import Batch


class TrainingRecord:
    """Appends to trained.jsonl: {"step", "digest", "sample_ids"}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, batch: Batch) -> None:
        """Durable when it returns."""
        line = {"step": step, "digest": batch.digest.hex(), "sample_ids": [s.sample_id for s in batch.samples]}
        append_rows(self.path, [line])
