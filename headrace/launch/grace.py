"""Computes how long services have to end in order: long enough for the trainer's current step."""

from __future__ import annotations

from pathlib import Path

from headrace.run_folder import last_fields_in

GRACE_SECONDS = 20.0
"""At least."""
LONGEST_GRACE_SECONDS = 600.0

_STEPS = 2
"""The one that runs may take longer than the last ones, and a checkpoint follows it."""
_ROWS = 3


def grace_seconds(metrics_file: Path) -> float:
    """Twice the longest of a run's last steps, within bounds; the lower bound when the file has no step."""
    return min(max(GRACE_SECONDS, _STEPS * max(_step_seconds(metrics_file), default=0.0)), LONGEST_GRACE_SECONDS)


def _step_seconds(metrics_file: Path) -> list[float]:
    seconds = [row["time/step_seconds"] for row in last_fields_in(metrics_file) if "time/step_seconds" in row]
    return [float(each) for each in seconds[-_ROWS:]]
