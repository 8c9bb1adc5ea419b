"""The metrics of a step, or of an evaluation, as one row of the report and one line of metrics.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STEP = re.compile(rb'\{"step": (\d+)[,}]')
"""Every line begins so: a reader that looks for some steps need not decode the others."""


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step or evaluation, and when they came (seconds since 1970)."""

    step: int
    time: float
    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    """Sentences for a person."""

    def fields(self) -> dict[str, Any]:
        """The line's fields, the step first."""
        warnings = {"warnings": self.warnings} if self.warnings else {}
        return {"step": self.step, "time": self.time, **warnings, **self.metrics}


def step_of(line: bytes) -> int | None:
    """Returns the step of a line, which a kill may have torn; None for what is no line of metrics."""
    found = _STEP.match(line)
    return int(found[1]) if found else None


def fields_of(line: bytes) -> dict[str, Any] | None:
    """Decodes a line; returns None for one that a kill tore, or that is being written."""
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return fields


def row_of(line: bytes) -> MetricsRow | None:
    """Returns a line's row; None for one that a kill tore."""
    if (fields := fields_of(line)) is None:
        return None
    return MetricsRow(fields.pop("step"), fields.pop("time"), warnings=fields.pop("warnings", ()), metrics=fields)
