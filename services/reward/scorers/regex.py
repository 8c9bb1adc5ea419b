"""Scores 1 when a pattern is found in the response, else 0. The pattern is `metadata.pattern`, or the label.

Flags go into the pattern, `(?is)`; anchors make it a format check, `^<think>.*</think>.*$`.
"""

from __future__ import annotations

import re

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import right_answers


def _of_label(label: str | None) -> str | None:
    """Raises InvalidArgument for an object that names no pattern: it would be a pattern that no response matches."""
    if label is None or not label.startswith(("{", '["')):
        return label
    return "|".join(f"(?:{pattern})" for pattern in right_answers("regex", label))


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument when there is no pattern or it does not compile."""
    pattern = item.metadata.get("pattern")
    if pattern is None:  # null is no pattern: a file's other rows may have one
        pattern = _of_label(item.label)
    if not isinstance(pattern, str):
        raise InvalidArgument("scorer regex needs a pattern as text: put it into metadata.pattern or the label")
    try:
        return float(re.search(pattern, item.response) is not None)
    except re.error as error:
        raise InvalidArgument(f"scorer regex cannot compile {pattern!r:.80}: {error}") from error
