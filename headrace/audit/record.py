"""The trainer's record, read: which samples went into which step of the run that lives on.

A line for step s means that the trainer stood at s again: what it had trained at s or later went with its old weights.
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
        step: int = row["step"]
        fed = {earlier: ids for earlier, ids in fed.items() if earlier < step}
        fed[step] = row["sample_ids"]
    return fed


def read_record(path: Path) -> Mapping[int, Sequence[str]]:
    """`fed_steps` of a file. Raises NotFound."""
    if not path.is_file():
        raise NotFound(f"{path} is not there: the trainer writes it with its first step, nothing was trained here yet")
    with path.open(encoding="utf-8") as lines:
        return fed_steps(lines)
