"""Computes how long services have to end in order: long enough for the trainer's current step."""

from __future__ import annotations

import json
from pathlib import Path

GRACE_SECONDS = 20.0
"""At least."""
LONGEST_GRACE_SECONDS = 600.0

_STEPS = 2
"""The one that runs may take longer than the last ones, and a checkpoint follows it."""
_ROWS = 3
_TAIL_BYTES = 65_536


def grace_seconds(metrics_file: Path) -> float:
    """Twice the longest of a run's last steps, within bounds; the lower bound when the file has no step."""
    return min(max(GRACE_SECONDS, _STEPS * max(_step_seconds(metrics_file), default=0.0)), LONGEST_GRACE_SECONDS)


def _step_seconds(metrics_file: Path) -> list[float]:
    if not metrics_file.is_file():
        return []
    with metrics_file.open("rb") as metrics:
        metrics.seek(max(0, metrics_file.stat().st_size - _TAIL_BYTES))
        lines = metrics.read().decode(errors="replace").splitlines()
    seconds = [row["time/step_seconds"] for line in lines if "time/step_seconds" in (row := _row(line))]
    return [float(each) for each in seconds[-_ROWS:]]


def _row(line: str) -> dict[str, float]:
    """Empty for an incomplete line."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
