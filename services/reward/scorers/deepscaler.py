"""DeepScaleR's rule: mathematics, where only a boxed answer after `</think>` (or `###Response`) counts."""

from __future__ import annotations

from dataclasses import replace

from headrace.score import ScoreItem
from services.reward.scorers import math
from services.reward.scorers.answers import boxed


def score(item: ScoreItem) -> float:
    """Scores 0 without the marker or the box; otherwise as `math` does. Raises InvalidArgument as that."""
    math.labels(item)
    for marker in ("</think>", "###Response"):
        _, found, solution = item.response.rpartition(marker)
        if found:
            answer = boxed(solution[max(0, solution.rfind("\\boxed")) :])  # one that is not closed is no answer
            return math.score(replace(item, response=f"\\boxed{{{answer}}}")) if answer is not None else 0.0
    return 0.0
