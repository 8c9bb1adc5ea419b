"""FAILED groups are tried again, after the operator has mended an engine, a scorer or a hook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from headrace.errors import FailedPrecondition, NotFound
from headrace.limits import MAX_RETRIES_PER_CALL
from services.buffer.ledger.commands import prompting
from services.buffer.ledger.commands.work import Work
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.indexed_stream import IndexedStream

_MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of a retry request: groups queued again, and groups that are still FAILED."""

    num_groups: int
    num_failed: int


def retry(work: Work, stream: IndexedStream, request_id: str, group_ids: Sequence[str]) -> Retried:
    """Queues FAILED groups again with no attempt counted, all or none. A repeated request gets the first answer."""
    state = stream.state
    if request_id not in state.retries:
        groups = [_failed(stream, group_id) for group_id in group_ids] if group_ids else _latest(work, stream)
        prompting.check_room(stream, len(groups))
        for group in groups:
            assert group.failure is not None
            queued = replace(group, state=GroupState.QUEUED, attempts=0, failure=None)
            work.change(stream, queued, "retried", detail=f"{group.failure.reason}: {group.failure.message}")
        remembered = dict(list(state.retries.items())[1 - _MAX_REMEMBERED :])
        work.set_state(stream, replace(state, retries={**remembered, request_id: len(groups)}))
    return Retried(stream.state.retries[request_id], stream.count(GroupState.FAILED))


def _latest(work: Work, stream: IndexedStream) -> list[Group]:
    return list(islice(stream.change_order.before(work.position + 1, (GroupState.FAILED,)), MAX_RETRIES_PER_CALL))


def _failed(stream: IndexedStream, group_id: str) -> Group:
    if group_id not in stream.groups:
        raise NotFound(f"stream {stream.state.name} has no group {group_id}")
    group = stream.groups[group_id]
    if group.state is not GroupState.FAILED:
        raise FailedPrecondition(
            f"group {group_id} is {group.state.value}, only FAILED ones are tried again: leave it out",
            reason="NOT_FAILED",
        )
    return group
