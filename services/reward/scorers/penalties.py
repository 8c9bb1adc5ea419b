"""Penalties for long and repetitive responses, from -1 to 0: parts of a composed reward.

The metadata of the row, or the part's `metadata_overrides`, have the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.limits import shown
from headrace.score import ScoreItem

_BUFFER_SHARE = 5
"""DAPO's buffer is a fifth of the longest response: 4,096 of 20,480 tokens."""
_NGRAM = 4


def overlong(tokens: int, most: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13).

    0 up to `most - buffer` tokens, from there down to -1 at `most` tokens, and -1 beyond.
    """
    if tokens <= most - buffer:
        return 0.0
    return max((most - buffer - tokens) / buffer, -1.0) if buffer else -1.0


def length(tokens: int, most: int) -> float:
    """The share of the longest response, below 0."""
    return -min(tokens / most, 1.0)


def repetition(text: str, ngram: int) -> float:
    """The share of runs of `ngram` words that were there before, below 0."""
    words = text.split()
    grams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def score_overlong(item: ScoreItem, args: HookArgs) -> float:
    most = _most(item, args)
    return overlong(item.response_tokens, most, _whole(item.metadata, "buffer_tokens", most // _BUFFER_SHARE, 0))


def score_length(item: ScoreItem, args: HookArgs) -> float:
    return length(item.response_tokens, _most(item, args))


def score_repetition(item: ScoreItem, args: HookArgs) -> float:
    return repetition(item.response, _whole(item.metadata, "ngram", _NGRAM))


def _most(item: ScoreItem, args: HookArgs) -> int:
    """Raises InvalidArgument where neither metadata nor the job say how long a response may be."""
    return _whole(item.metadata, "max_tokens", args.get("rollout_max_response_len"))


def _whole(metadata: Mapping[str, Any], key: str, default: int | None, least: int = 1) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"metadata.{key} is {shown(value)}, must be a whole number from {least}")
    return value
