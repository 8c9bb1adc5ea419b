"""The ledger's memory, how a store's rows become it, and the transactions that change both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from headrace.errors import DataLoss, FailedPrecondition, Fenced, NotFound
from headrace.limits import shown
from headrace.protobuf import Payload
from services.buffer.ledger.group import Group, GroupState, NewSample
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.queues import LeaseTable
from services.buffer.ledger.stream import StreamConfig, StreamState


@dataclass(frozen=True, slots=True)
class Instant:
    """The current time on two clocks: leases use monotonic seconds, the history Unix seconds."""

    monotonic: float
    unix: float


class LedgerEvent(msgspec.Struct, frozen=True, gc=False):
    """One transition. Positions are 1, 2, 3, … without gaps over the whole ledger."""

    position: int
    unix_seconds: float
    stream: str
    kind: str
    group_id: str | None = None
    state: GroupState | None = None
    epoch: int | None = None
    step: int | None = None
    policy_version: int | None = None
    sample_ids: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Transaction:
    """The rows to write and to delete, together or not at all. It is empty when a command changed nothing."""

    streams: dict[str, StreamState] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    new_groups: list[str] = field(default_factory=list)
    forgotten: list[Group] = field(default_factory=list)
    """Groups that are deleted, with their prompts; applied after `groups`."""
    payloads: dict[str, Payload] = field(default_factory=dict)
    """Payloads by SampleRecord.key; the records are in `groups`."""
    with_columns: list[NewSample] = field(default_factory=list)
    """Those samples of `payloads` that name columns out of line."""
    deleted_payloads: list[str] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    events_from: int | None = None
    """Events below this position are deleted."""


class LedgerState:
    """All streams of one server. `ledger_id` keeps lease ids apart from those of another ledger at the same address."""

    def __init__(self, ledger_id: str, *, retain_events: int | None = None) -> None:
        """`retain_events` is how many events are kept at least (at most an eighth more); None keeps all."""
        self.ledger_id = ledger_id
        self.retain_events = retain_events
        self.position = 0
        self.oldest_position = 1
        """The history starts here; events below were deleted."""
        self.streams: dict[str, IndexedStream] = {}
        self.deleted: dict[str, StreamState] = {}
        """The last stream of each name that no stream has now: its group numbers and epochs are not used again."""
        self.leftovers: dict[str, list[Group]] = {}
        """Groups of deleted streams by name, until `purge_deleted` deletes them. The name may be in use again."""
        self.leases = LeaseTable()
        self.lost_streams: frozenset[str] = frozenset()
        self.problems: list[str] = []
        """Counters that did not fit the groups that `restore` loaded."""

    def restore(
        self,
        now: Instant,
        streams: Iterable[StreamState],
        groups: Iterable[Group],
        position: int,
        oldest_position: int = 1,
        lost_streams: Iterable[str] = (),
        lost_groups: Iterable[str] = (),
    ) -> None:
        """Loads what a store held. Every lease starts its full time again.

        Commands on `lost_streams`, whose own rows are damaged, are refused. `lost_groups` can only be dropped, by their
        ids.
        """
        self.lost_streams = frozenset(lost_streams)
        self.position = position
        self.oldest_position = oldest_position
        for state in streams:
            if state.deleted:
                self.deleted[state.name] = state
            else:
                self.streams[state.name] = IndexedStream(state)
        for group in sorted(groups, key=lambda g: g.position):
            if group.stream in self.deleted or group.seq < self.stream(group.stream).state.first_seq:
                self.leftovers.setdefault(group.stream, []).append(group)
                continue
            stream = self.stream(group.stream)
            stream.place(group)
            if group.lease:
                self.leases.grant(group, now.monotonic + stream.state.config.lease_seconds)
        lost_groups = list(lost_groups)
        lacking = {group_id.rpartition("/")[0] for group_id in lost_groups}
        for name, stream in self.streams.items():
            stream.state, problems = _corrected(stream, is_complete=name not in lacking)
            self.problems += problems
        for group_id in lost_groups:
            if known := self.streams.get(group_id.rpartition("/")[0]):
                known.note_lost(group_id)

    def stream(self, stream: str) -> IndexedStream:
        """Raises NotFound for a stream that was never created, DataLoss for one whose row is damaged."""
        self.require_whole(stream)
        if stream not in self.streams:
            raise NotFound(
                f"there is no stream {shown(stream)}: CreateStream makes one; there are {sorted(self.streams)[:10]}"
            )
        return self.streams[stream]

    def stream_id(self, stream: str) -> str:
        """Names the stream beyond its name: no other stream, of this ledger or another, has the same id."""
        return f"{self.stream(stream).state.created_at}.{self.ledger_id}"

    def require_same(self, stream: str, stream_id: str | None) -> None:
        """Raises Fenced when the stream of this id was deleted and its name is used again. None: any stream will do."""
        if stream_id is None or stream_id == (now_id := self.stream_id(stream)):
            return
        if stream_id.rpartition(".")[2] != self.ledger_id:
            raise FailedPrecondition(
                f"stream {stream} has the stream_id {now_id} in this ledger, the call says {shown(stream_id)}, which "
                "is of another ledger: ask GetStats for the stream_id, or check the buffer's address and --data-dir",
                reason="OTHER_LEDGER",
            )
        raise Fenced(
            f"the stream {stream} with the stream_id {shown(stream_id)} was deleted, and another one of this name was "
            f"created (stream_id {now_id}): stop what works on the deleted one; to use the new one, ask GetStats for "
            "its stream_id"
        )

    def config_of(self, group_id: str) -> StreamConfig | None:
        """The config of the group's stream; None when the stream does not exist."""
        stream = self.streams.get(group_id.rpartition("/")[0])
        return None if stream is None else stream.state.config

    def live(self, lease_id: str) -> Group | None:
        """Returns the group under a live lease; None when the lease ended or its stream is deleted."""
        group = self.leases.find(lease_id)
        return group if group and self.stream_with(group) else None

    def stream_with(self, group: Group) -> IndexedStream | None:
        """None for a group of a deleted stream. Another stream of its name does not have it: ids are not used again."""
        stream = self.streams.get(group.stream)
        return stream if stream and group.group_id in stream.groups else None

    def require_whole(self, stream: str) -> None:
        if stream in self.lost_streams:
            raise DataLoss(
                f"the ledger's row of stream {stream} is damaged, and nothing of it can go on without: restore a "
                "backup; other streams are served"
            )


# Counters are compared with the groups when a ledger is loaded, and corrected where they contradict them.
# A number that is too low would be given to two groups, so it is never trusted blindly.

_TRAINABLE = (GroupState.READY, GroupState.CONSUMED, GroupState.COMMITTED)


def _corrected(stream: IndexedStream, *, is_complete: bool) -> tuple[StreamState, list[str]]:
    """Returns the state to use, and a sentence for each counter or group that contradicts the others.

    `is_complete`: no group of the stream is known to be lost, so that groups can be counted.
    """
    state, groups = stream.state, stream.groups.values()
    is_complete = is_complete and not stream.incomplete_steps()
    batched = [group for group in groups if group.step is not None and group.state in _TRAINABLE]
    committed = state.forgotten.get(GroupState.COMMITTED.value, 0)
    num_groups = len(groups) + sum(state.forgotten.values())
    next_seq = max(max((group.seq for group in groups), default=-1) + 1, state.first_seq + num_groups)
    num_inserted = sum(stream.counts[one] for one in _TRAINABLE) + committed
    right = {"next_seq": max(state.next_seq, next_seq), "num_inserted": max(state.num_inserted, num_inserted)}
    if is_complete:
        right["num_taken"] = len(batched) + committed
    changed = {name: value for name, value in right.items() if value != getattr(state, name)}
    problems = [
        f"stream {state.name}: its {name} is {getattr(state, name)}, and its groups give {value}, which is used instead"
        for name, value in changed.items()
    ]
    if is_complete and state.taken and not state.forgotten:
        of_source = Counter(group.source for group in batched)
        taken = tuple(of_source[i] for i in range(len(state.taken)))
        if taken != state.taken:
            problems.append(
                f"stream {state.name}: by its counters its sources gave {list(state.taken)} groups to batches, by its "
                f"groups {list(taken)}, which is used instead"
            )
            state = replace(state, taken=taken)
    problems += [problem for group in batched if (problem := _step_problem(state, group))]
    return replace(state, **changed), problems


def _step_problem(state: StreamState, group: Group) -> str | None:
    assert group.step is not None, "the caller passes groups of batches"
    first, end = state.committed_step, state.step
    is_right = {
        GroupState.READY: group.step >= end,
        GroupState.CONSUMED: first <= group.step < end,
        GroupState.COMMITTED: group.step < first,
    }[group.state]
    if is_right:
        return None
    return (
        f"group {group.group_id} is {group.state.value} in the batch of step {group.step}, and stream {state.name} has "
        f"consumed the steps below {end} and committed those below {first}"
    )
