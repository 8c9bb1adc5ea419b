"""Overlap of words with the label, from 0 to 1: F1 as SQuAD and HotpotQA count it.

Where the label lists several answers, the best overlap counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, right_answers

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = frozenset(("yes", "no", "noanswer"))
"""Answers that are right as a whole or not at all."""


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument without a label, or with an object that names no answer."""
    if item.label is None:
        raise InvalidArgument("scorer f1 compares with the label, and the item has none: set --label-key")
    answer = _words(after_thinking(item.response))
    labels = right_answers("f1", item.label)
    return max(_overlap(answer, _words(label)) for label in labels)


def _overlap(answer: list[str], label: list[str]) -> float:
    if answer == label:
        return 1.0
    if any(len(words) == 1 and words[0] in _VERDICTS for words in (answer, label)):
        return 0.0
    common = sum((Counter(answer) & Counter(label)).values())
    return 2 * common / (len(answer) + len(label))


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
