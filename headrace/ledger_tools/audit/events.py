"""The state transition of each kind of event: from which states, to which. The ledger makes no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.api.buffer.v1 import buffer_pb2 as pb

State: TypeAlias = pb.GroupState.ValueType

NOT_THERE = pb.GROUP_STATE_UNSPECIFIED
QUEUED = pb.GROUP_STATE_QUEUED
LEASED = pb.GROUP_STATE_LEASED
READY = pb.GROUP_STATE_READY
CONSUMED = pb.GROUP_STATE_CONSUMED
COMMITTED = pb.GROUP_STATE_COMMITTED
DROPPED = pb.GROUP_STATE_DROPPED
FAILED = pb.GROUP_STATE_FAILED


@dataclass(frozen=True, slots=True)
class Move:
    """A transition from one of some states to one of others."""

    before: frozenset[State]
    after: frozenset[State]


def _move(before: tuple[State, ...], after: tuple[State, ...]) -> Move:
    return Move(frozenset(before), frozenset(after))


MOVES: Mapping[str, Move] = {
    "submitted": _move((NOT_THERE,), (QUEUED,)),
    "leased": _move((QUEUED,), (LEASED,)),
    "released": _move((LEASED,), (QUEUED,)),
    "lease_expired": _move((LEASED,), (QUEUED,)),
    "failed": _move((LEASED,), (QUEUED, FAILED)),
    "put": _move((LEASED,), (READY,)),
    "dropped": _move((QUEUED, LEASED, READY, FAILED), (DROPPED,)),
    "expired": _move((READY,), (QUEUED, DROPPED)),
    "retried": _move((FAILED,), (QUEUED,)),
    "batched": _move((READY,), (READY,)),
    "unbatched": _move((READY,), (READY,)),
    "consumed": _move((READY,), (CONSUMED,)),
    "rewound": _move((CONSUMED,), (READY,)),
    "committed": _move((CONSUMED,), (COMMITTED,)),
}
STREAM_KINDS = frozenset(
    {"stream_created", "stream_deleted", "limits_changed", "policy_version", "rewound", "forgotten"}
)


def state_name(state: State) -> str:
    """The state without its prefix, for people."""
    if state == NOT_THERE:
        return "not there"
    if state not in pb.GroupState.values():
        return f"state {state}"
    return pb.GroupState.Name(state).removeprefix("GROUP_STATE_")
