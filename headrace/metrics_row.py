"""The metrics of a step, or of an evaluation, as one line of a run's metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.wire.json_text import object_of_line

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
"""Every line begins so: a reader that looks for some steps need not decode the others."""
_TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step or evaluation, and when they came (seconds since 1970)."""

    step: int
    time: float
    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    """Sentences for a person."""
    marks: Sequence[str] = ()
    """What changed before the step, for the pictures: a restart, options, the scorer."""

    def fields(self) -> dict[str, Any]:
        """The line's fields, the step first."""
        texts = {"warnings": self.warnings, "marks": self.marks}
        return {"step": self.step, "time": self.time, **{k: v for k, v in texts.items() if v}, **self.metrics}


def step_of(line: bytes) -> int | None:
    """Returns the step of a line, which a kill may have torn; None for what is no line of metrics."""
    found = _STEP.match(line)
    return int(found[1]) if found else None


def row_of(line: bytes) -> MetricsRow | None:
    """Returns a line's row; None for one that a kill tore."""
    if (fields := object_of_line(line)) is None:
        return None
    warnings, marks = fields.pop("warnings", ()), fields.pop("marks", ())
    return MetricsRow(fields.pop("step"), fields.pop("time"), warnings=warnings, marks=marks, metrics=fields)


def fields_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the fields of each whole line; none where there is no file: it may be on the trainer's machine."""
    if file.is_file():
        with file.open("rb") as lines:
            yield from filter(None, map(object_of_line, lines))


def last_fields_in(file: Path) -> list[dict[str, Any]]:
    """The fields of the last lines, as `fields_in`: of a file of any size 64 KiB are read."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return list(filter(None, map(object_of_line, lines)))
