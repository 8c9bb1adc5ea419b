"""Finds the shard of a group, a lease or a prompt, and decides what follows from partial answers of the shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.digits import whole_number
from headrace.errors import DeadlineExceeded, NotFound, Unavailable
from headrace.wire.limits import MAX_COUNTER

_Answer = TypeVar("_Answer")


def shard_of_group(group_id: str, num_shards: int) -> int:
    """The group's number modulo `num_shards`. Raises NotFound when the id has no number."""
    number = whole_number(group_id.rpartition("/")[2], MAX_COUNTER)
    if number is None:
        raise NotFound(f"there is no group {group_id}: a group's id ends with /NUMBER")
    return number % num_shards


def grouped(shards: Iterable[int]) -> dict[int, list[int]]:
    """Maps a shard to the indices of its items."""
    parts: dict[int, list[int]] = {}
    for i, k in enumerate(shards):
        parts.setdefault(k, []).append(i)
    return parts


def group_of_lease(lease_id: str) -> str:
    """A lease's id begins with its group's."""
    return lease_id.partition("#")[0]


def shard_of_prompt(prompt: sample_pb2.Prompt, num_shards: int) -> int:
    """A hash of its id chooses the shard, so a prompt that is submitted again gets the same one."""
    digest = hashlib.sha256(prompt.prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards


def answers_that_came(found: Sequence[_Answer | BaseException], *, least: int) -> list[_Answer]:
    """The answers without the errors.

    Raises an error when there are fewer than `least` answers, or when one of the errors is not a sign of a missing
    shard.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []
    for each in found:
        if isinstance(each, BaseException):
            errors.append(each)
        else:
            answers.append(each)
    telling = [error for error in errors if not isinstance(error, Unavailable | DeadlineExceeded)]
    if telling or (errors and len(answers) < least):
        raise (telling or errors)[0]
    return answers


def soonest_reason(reasons: Sequence[pb.NoLeaseReason.ValueType]) -> pb.NoLeaseReason.ValueType:
    """The reason of the shard that may lease soonest.

    EXHAUSTED only when all shards say so, UNSPECIFIED when none gives a reason.
    """
    told = sorted(set(reasons) - {pb.NO_LEASE_REASON_UNSPECIFIED}, key=lambda r: r == pb.NO_LEASE_REASON_EXHAUSTED)
    return told[0] if told else pb.NO_LEASE_REASON_UNSPECIFIED
