"""The metrics of a step, or of an evaluation, as one row of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step or evaluation, and when they came (seconds since 1970)."""

    step: int
    time: float
    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    """Sentences for a person."""
