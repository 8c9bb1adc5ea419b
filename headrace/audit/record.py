"""The trainer's record, read: which samples went into which step.

A step that was run again has a later line, which counts: the ledger gives a step the same batch however often it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headrace.errors import NotFound


def fed_steps(lines: Iterable[str]) -> Mapping[int, Sequence[str]]:
    """Step → sample ids. A line that a kill has cut is passed over: its step was never consumed."""
    fed: dict[int, Sequence[str]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        fed[row["step"]] = row["sample_ids"]
    return fed


def read_record(path: Path) -> Mapping[int, Sequence[str]]:
    """`fed_steps` of a file. Raises NotFound."""
    if not path.is_file():
        raise NotFound(f"{path} is not there: the trainer writes it with its first step, nothing was trained here yet")
    with path.open(encoding="utf-8") as lines:
        return fed_steps(lines)
