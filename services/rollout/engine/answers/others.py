"""Reads answers that are no response: scores of given tokens, the weights' name, checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.rollout.engine.answers.bad_answer import (
    LONGEST_NAME,
    BadAnswer,
    read_log_prob,
    read_pair,
    require_object,
    shown,
)


def read_scores(reply: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Returns log-probs of all of `tokens` but the first. Raises BadAnswer for scores of other tokens."""
    if reply.get("success", True) is not True:
        raise BadAnswer("not_successful", f"success is {shown(reply['success'])}: {shown(reply.get('message'))}")
    meta = require_object(reply.get("meta_info"), "meta_info")
    pairs = meta.get("input_token_logprobs")
    if not isinstance(pairs, list) or len(pairs) != len(tokens):
        found = len(pairs) if isinstance(pairs, list) else type(pairs).__name__
        raise BadAnswer("scores_count", f"{found} input_token_logprobs for {len(tokens)} tokens")
    if [read_pair(pair)[1] for pair in pairs] != list(tokens):
        raise BadAnswer("scores_of_other_tokens", "input_token_logprobs are of other tokens than were asked about")
    return [read_log_prob(pair[0]) for pair in pairs[1:]]


def read_weights_name(reply: Mapping[str, Any]) -> str:
    """Reads the weights' name from /model_info. Raises BadAnswer."""
    name = reply.get("weight_version")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise BadAnswer("model_info", f"weight_version is {shown(name)}")
    return name


def read_checksums(reply: Mapping[str, Any], *, may_be_empty: bool = False) -> list[dict[str, str]]:
    """Returns name → checksum for each tensor-parallel rank, empty only where it may be. Raises BadAnswer."""
    ranks = reply.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise BadAnswer("checksums", f"ranks are {shown(ranks)}")
    found = [require_object(require_object(rank, "a rank").get("checksums"), "checksums") for rank in ranks]
    if any(not (rank or may_be_empty) or not all(isinstance(v, str) for v in rank.values()) for rank in found):
        raise BadAnswer("checksums", "a rank without checksums, or with one that is no text")
    return [dict(rank) for rank in found]
