"""Samples that the trainer could not use, written down: a step that is run again sets the same ones aside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.trainer.data.reading import UnusableSample
from services.trainer.files.durable_rows import append_rows
from services.trainer.plan.batch import Batch

_GONE = "NOT_FOUND"


class SetAside:
    """Appends to set_aside.jsonl: {"step", "sample_id", "reason", "message"}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._messages = _read(path)

    def applied(self, batch: Batch) -> Batch:
        """The batch with what was set aside before."""
        known = self._messages
        samples = tuple(s.without(known[s.sample_id]) if s.sample_id in known else s for s in batch.samples)
        return replace(batch, samples=samples)

    def append(self, step: int, bad: Sequence[UnusableSample]) -> None:
        """Durable when it returns. What the ledger does not have is not written: it is asked again."""
        rows = [
            {"step": step, "sample_id": one.sample_id, "reason": one.reason, "message": one.message}
            for one in bad
            if one.reason != _GONE
        ]
        if rows:
            append_rows(self.path, rows)
            self._messages |= {str(row["sample_id"]): str(row["message"]) for row in rows}


def _read(path: Path) -> dict[str, str]:
    """Lines that a kill has cut are left out: their step was not trained."""
    if not path.exists():
        return {}
    found: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            found[row["sample_id"]] = row["message"]
        except (ValueError, KeyError, TypeError):
            continue
    return found
