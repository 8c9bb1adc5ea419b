"""Reads an engine's load from /v1/loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.limits import MAX_COUNTER, MAX_ENGINES
from services.rollout.engine.answers.bad_answer import BadAnswer, require_object, shown


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests, the share of the key-value cache that they use, and how many were taken back from running."""

    running: int
    waiting: int
    cache_usage: float
    retracted: int = 0


def read_load(reply: Mapping[str, Any]) -> EngineLoad:
    """Adds up the data-parallel ranks; the fullest cache counts. Raises BadAnswer."""
    ranks = reply.get("loads")
    if not isinstance(ranks, list) or not 0 < len(ranks) <= MAX_ENGINES:
        raise BadAnswer("load", f"loads are {shown(ranks)}")
    each = [require_object(rank, "a load") for rank in ranks]
    queues = [require_object(rank.get("queues") or {}, "queues") for rank in each]
    return EngineLoad(
        sum(_count(rank.get("num_running_reqs")) for rank in each),
        sum(_count(rank.get("num_waiting_reqs")) for rank in each),
        max(_share(rank.get("token_usage")) for rank in each),
        sum(_count(queue.get("retracted", 0)) for queue in queues),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNTER:
        raise BadAnswer("load", f"a number of requests is {shown(value)}")
    return value


def _share(value: Any) -> float:
    if type(value) not in (float, int) or not 0 <= value <= 1:
        raise BadAnswer("load", f"token_usage is {shown(value)}, must be 0 to 1")
    return float(value)
