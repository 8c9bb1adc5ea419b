"""DAPO's rule: 1 when what follows the last `Answer:` equals the label, else -1."""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.errors import InvalidArgument
from headrace.hooks import Reward
from headrace.score import ScoreItem
from services.reward.scorers import math

_TAIL_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*((?:(?!answer\s*:)[^\n])+)", re.IGNORECASE)


def score(item: ScoreItem) -> Reward:
    """`score` is 1 or -1, `acc` 1 or 0. Raises InvalidArgument as `math` does, which compares."""
    if not item.label:
        raise InvalidArgument("scorer dapo compares with the label, and the item has none: set --label-key")
    math.labels(item)
    found = _ANSWER.findall(item.response[-_TAIL_CHARACTERS:])
    answer = found[-1].strip().strip("*").strip() if found else ""
    right = bool(answer) and math.score(replace(item, response=_as_boxed(answer))) == 1.0
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _as_boxed(answer: str) -> str:
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
