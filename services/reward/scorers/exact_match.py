"""Scores 1 when the response, without surrounding blanks, is the label; else 0."""

from __future__ import annotations

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument without a label."""
    if item.label is None:
        raise InvalidArgument("scorer exact_match compares with the label, and the item has none: set --label-key")
    return float(after_thinking(item.response).strip() == item.label.strip())
