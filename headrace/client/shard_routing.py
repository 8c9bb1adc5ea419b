"""Which shard a group, a lease or a prompt belongs to, and what is made of the answers of some of the shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DeadlineExceeded, NotFound, Unavailable

_Answer = TypeVar("_Answer")


def shard_of_group(group_id: str, num_shards: int) -> int:
    """By the group's number. Raises NotFound for what is no group's id."""
    number = group_id.rpartition("/")[2]
    if not number.isdecimal():
        raise NotFound(f"there is no group {group_id}")
    return int(number) % num_shards


def grouped(shards: Iterable[int]) -> dict[int, list[int]]:
    """Shard → indices of what is its own."""
    parts: dict[int, list[int]] = {}
    for i, k in enumerate(shards):
        parts.setdefault(k, []).append(i)
    return parts


def group_of_lease(lease_id: str) -> str:
    """A lease's id begins with its group's."""
    return lease_id.partition("#")[0]


def shard_of_prompt(prompt: sample_pb2.Prompt, num_shards: int) -> int:
    """By a hash of its id: the same for a prompt that is submitted again."""
    digest = hashlib.sha256(prompt.prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards


def answers_that_came(found: Sequence[_Answer | BaseException], *, least: int) -> list[_Answer]:
    """Those that came. Raises what was raised when they are fewer than `least`, or when it is no sign of absence."""
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
    """What holds back the shard that would give soonest: EXHAUSTED only when all are. UNSPECIFIED for none."""
    told = sorted(set(reasons) - {pb.NO_LEASE_REASON_UNSPECIFIED}, key=lambda r: r == pb.NO_LEASE_REASON_EXHAUSTED)
    return told[0] if told else pb.NO_LEASE_REASON_UNSPECIFIED
