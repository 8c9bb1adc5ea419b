"""Commands of operators: FAILED groups are tried again, groups are taken out for good, streams come and go.

FAILED groups are tried again after an engine, a scorer or a hook was mended. Groups that are dropped are poison which
no check caught, or their records are damaged.
A batch that is not consumed is dissolved when a group leaves it: its other groups are READY without a batch, and the
step's next LeaseBatch chooses again. This is the one way in which a step's batch changes, and the history says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from headrace.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from headrace.limits import MAX_GROUPS_PER_STEP, MAX_RETRIES_PER_CALL
from headrace.trajectory import Failure
from services.buffer.ledger.group import Group, GroupState, Prompt
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.produce import check_room
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.ledger.work import MAX_CHANGES, Work, remembered, require_distinct

DROP_REASON = "OPERATOR"
_WAY_OUT = {
    GroupState.CONSUMED: "a step has trained on it: stop the trainer, let Rewind take the step back, and drop it then",
    GroupState.COMMITTED: "a checkpoint was trained on it: go back to an earlier checkpoint of the run",
}


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of a drop request: dropped groups and dissolved batches."""

    num_groups: int
    num_batches: int


def drop(work: Work, stream: IndexedStream, request_id: str, group_ids: Sequence[str], reason: str) -> Dropped:
    """Makes all of these groups DROPPED, or none. A repeated request changes nothing and gets the first answer."""
    require_distinct("group_id", group_ids)
    if request_id not in stream.state.drops:
        lost = [group_id for group_id in group_ids if group_id in stream.lost_groups]
        found = [_droppable(stream, group_id) for group_id in group_ids if group_id not in stream.lost_groups]
        groups = [group for group in found if group.state is not GroupState.DROPPED]
        steps = {group.step for group in groups if group.step is not None}
        if lost:
            steps.update(_steps_that_lack_groups(stream))
        _check_size(stream, steps)
        dropped = Dropped(len(groups) + len(lost), len(steps))
        _take_back(work, stream, steps)
        for group in groups:
            _drop(work, stream, group, Failure(DROP_REASON, reason))
        for group_id in lost:
            _drop_lost(work, stream, group_id, Failure(DROP_REASON, f"its record was damaged: {reason}"))
        for step in sorted(steps):
            _dissolve(work, stream, step)
        drops = remembered(stream.state.drops, request_id, (dropped.num_groups, dropped.num_batches))
        work.set_state(stream, replace(stream.state, drops=drops))
    return Dropped(*stream.state.drops[request_id])


def _known(stream: IndexedStream, group_id: str) -> Group:
    if group_id not in stream.groups:
        raise NotFound(f"stream {stream.state.name} has no group {group_id}")
    return stream.groups[group_id]


def _droppable(stream: IndexedStream, group_id: str) -> Group:
    group = _known(stream, group_id)
    if group.state in _WAY_OUT:
        raise FailedPrecondition(
            f"group {group_id} is {group.state.value}, {_WAY_OUT[group.state]}", reason=group.state.value
        )
    return group


def _steps_that_lack_groups(stream: IndexedStream) -> list[int]:
    """Returns the steps with incomplete batches; the record of a lost group no longer says which was its own."""
    steps = stream.incomplete_steps()
    if steps and steps[0] < stream.state.step:
        raise FailedPrecondition(
            f"the batch of step {steps[0]}, which is consumed, lacks a group whose record is damaged: "
            f"{_WAY_OUT[GroupState.CONSUMED]}, or wait until a checkpoint has it",
            reason=GroupState.CONSUMED.value,
        )
    return steps


def _check_size(stream: IndexedStream, steps: Iterable[int]) -> None:
    """Refuses to change more groups in one command than one step may have."""
    sizes = [len(stream.members(step)) for step in steps]
    if len(sizes) > 1 and sum(sizes) > MAX_GROUPS_PER_STEP:
        raise InvalidArgument(
            f"the batches of {len(sizes)} steps, with {sum(sizes)} groups, would be dissolved, one call dissolves "
            f"{MAX_GROUPS_PER_STEP}: drop these groups in several calls",
            field="group_ids",
            reason="BATCH_TOO_LARGE",
        )


def _take_back(work: Work, stream: IndexedStream, steps: Collection[int]) -> None:
    """Corrects the counts of groups taken, for the limiter and for each source's share."""
    state = stream.state
    members = [group for step in steps for group in stream.members(step)]
    of_source = Counter(group.source for group in members)
    taken = tuple(state.taken_of(i) - of_source[i] for i in range(len(state.cursors)))
    num_taken = state.num_taken - len(steps) * state.config.groups_per_step  # lost groups of a batch, too
    work.set_state(stream, replace(state, num_taken=num_taken, taken=taken))


def _drop(work: Work, stream: IndexedStream, group: Group, failure: Failure) -> None:
    if group.state is GroupState.QUEUED:
        stream.queues.discard_queued(group)
    elif group.state is GroupState.LEASED:
        group = work.end_lease(group)
    work.drop(stream, group, failure)


def _drop_lost(work: Work, stream: IndexedStream, group_id: str, failure: Failure) -> None:
    """Puts a DROPPED group of this name in the place of the damaged record."""
    stream.lost_groups.remove(group_id)
    prompt = Prompt(f"\0{group_id}", b"")  # not anybody's: ids hold no control characters
    work.transaction.new_groups.append(group_id)
    work.drop(stream, Group(group_id, stream.state.name, stream.seq_of(group_id), prompt), failure)


def _dissolve(work: Work, stream: IndexedStream, step: int) -> None:
    for group in stream.members(step):
        free = replace(group, step=None, batch_index=None)
        work.change(stream, free, "unbatched", step=step, detail=f"a group of the batch of step {step} was dropped")


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of a retry request: groups queued again, and groups that are still FAILED."""

    num_groups: int
    num_failed: int


def retry(work: Work, stream: IndexedStream, request_id: str, group_ids: Sequence[str]) -> Retried:
    """Queues FAILED groups again with no attempt counted, all or none; without ids the latest, up to a call's limit.

    A repeated request gets the first answer.
    """
    require_distinct("group_id", group_ids)
    state = stream.state
    if request_id not in state.retries:
        groups = [_failed(stream, group_id) for group_id in group_ids] if group_ids else _latest(work, stream)
        check_room(stream, len(groups))
        for group in groups:
            assert group.failure is not None
            queued = replace(group, state=GroupState.QUEUED, attempts=0, failure=None)
            work.change(stream, queued, "retried", detail=f"{group.failure.reason}: {group.failure.message}")
        work.set_state(stream, replace(state, retries=remembered(state.retries, request_id, len(groups))))
    return Retried(stream.state.retries[request_id], stream.count(GroupState.FAILED))


def _latest(work: Work, stream: IndexedStream) -> list[Group]:
    return list(islice(stream.change_order.before(work.position + 1, (GroupState.FAILED,)), MAX_RETRIES_PER_CALL))


def _failed(stream: IndexedStream, group_id: str) -> Group:
    group = _known(stream, group_id)
    if group.state is not GroupState.FAILED:
        raise FailedPrecondition(
            f"group {group_id} is {group.state.value}, only FAILED ones are tried again: leave it out",
            reason="NOT_FAILED",
        )
    return group


# Whole streams


def create(work: Work, state: StreamState) -> bool:
    """Returns True for a new stream. Raises AlreadyExists when the stream exists with another config."""
    work.ledger.require_whole(state.name)
    known = work.ledger.streams.get(state.name)
    if known and known.state.config != state.config:
        raise AlreadyExists(
            f"stream {state.name} exists with another config: {_differences(known.state.config, state.config)}; "
            "use another name, or another data directory"
        )
    if known is None:
        if gone := work.ledger.deleted.pop(state.name, None):
            state = replace(state, next_seq=gone.next_seq, first_seq=gone.next_seq, epoch=gone.epoch + 1)
        state = replace(state, created_at=work.position + 1)
        stream = work.ledger.streams[state.name] = IndexedStream(state)
        work.set_state(stream, state)
        work.announce(stream, "stream_created")
    return known is None


def set_limits(work: Work, limits: StreamConfig) -> None:
    """Replaces the limits of the stream of that name, and nothing else."""
    stream = work.ledger.stream(limits.name)
    config = stream.state.config.with_limits_of(limits)
    if config != stream.state.config:
        changes = _differences(stream.state.config, config)
        work.set_state(stream, replace(stream.state, config=config))
        work.announce(stream, "limits_changed", detail=changes)


def delete(work: Work, stream: str, *, force: bool, stream_id: str | None = None) -> bool:
    """True when the stream existed. Its groups are deleted by `purge_deleted`. Raises FailedPrecondition."""
    indexed = work.ledger.streams.get(stream)
    if indexed is None or stream_id not in (None, work.ledger.stream_id(stream)):
        return False
    if indexed.num_groups and not force:
        raise FailedPrecondition(
            f"stream {stream} has {indexed.num_groups} groups that are queued, leased, ready or consumed: "
            "set force to delete them",
            reason="NOT_EMPTY",
        )
    state = work.ledger.streams.pop(stream).state
    work.announce(indexed, "stream_deleted", detail=f"with {len(indexed.groups)} groups")
    emptied = StreamState(state.config, state.epoch, next_seq=state.next_seq, deleted=True)
    work.set_state(indexed, emptied)
    work.ledger.deleted[stream] = emptied
    work.ledger.leftovers.setdefault(stream, []).extend(indexed.groups.values())
    return True


def purge_deleted(work: Work, stream: str) -> int:
    """Deletes a chunk of the groups of deleted streams of this name; returns how many."""
    groups = work.ledger.leftovers.get(stream, [])
    some = groups[-MAX_CHANGES:]
    del groups[-MAX_CHANGES:]
    if not groups:
        work.ledger.leftovers.pop(stream, None)
    for group in some:
        work.purge(group)
    return len(some)


def _differences(old: StreamConfig, new: StreamConfig) -> str:
    names = [n for n in StreamConfig.__slots__ if getattr(old, n) != getattr(new, n)]
    return ", ".join(f"{n} is {getattr(old, n)!r}, now {getattr(new, n)!r}" for n in names)
