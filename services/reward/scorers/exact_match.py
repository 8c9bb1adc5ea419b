"""Scores 1 when the response, without surrounding blanks, is the label; else 0. A label may list several answers."""

from __future__ import annotations

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, right_answers


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument without a label, or with an object that names no answer."""
    if item.label is None:
        raise InvalidArgument("scorer exact_match compares with the label, and the item has none: set --label-key")
    answers = (item.label, *right_answers("exact_match", item.label, repeats_json=True))
    return float(after_thinking(item.response).strip() in map(str.strip, answers))
