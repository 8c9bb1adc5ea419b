"""The ledger's state machine: commands in, answers and transactions out. No gRPC, no disk, no clock: time is passed in.

A command checks everything first and raises with nothing changed, or changes memory and returns what must be made
durable before its answer may leave the process. A command that changes nothing returns an empty transaction; its answer
still has to wait for the transactions before it. No command looks at all groups: every question has an index.
The states are in `group`, the staleness rule in `admission`, the commands in `producing` and `training`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AlreadyExists, DataLoss, FailedPrecondition, Fenced, InvalidArgument, NotFound
from headrace.limits import shown
from services.buffer.ledger.commands import producing, prompting, training
from services.buffer.ledger.commands.dropping import Dropped, drop
from services.buffer.ledger.commands.producing import GroupPut, NoLeaseReason, PutResult, Release
from services.buffer.ledger.commands.prompting import Finish
from services.buffer.ledger.commands.retrying import Retried, retry
from services.buffer.ledger.commands.training import StepBatch
from services.buffer.ledger.commands.work import MAX_CHANGES, Work
from services.buffer.ledger.counters import corrected
from services.buffer.ledger.group import Group, GroupState, Prompt, SampleRecord
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.queues.leases import LeaseTable
from services.buffer.ledger.source import Cursor
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.ledger.transaction import Instant, Transaction

_Answer = TypeVar("_Answer")
Result = tuple[_Answer, Transaction]
_EVENTS_FORGOTTEN_SHARE = 8
"""Old events are deleted when an eighth of retain_events has gathered."""


class Ledger:
    """All streams of one server. `ledger_id` keeps lease ids apart from those of another ledger at the same address."""

    def __init__(self, ledger_id: str, *, retain_events: int | None = None) -> None:
        """`retain_events` is how many events are kept at least (at most an eighth more); None keeps all."""
        self.position = 0
        self.oldest_position = 1
        """The history starts here; events below were deleted."""
        self._retain_events = retain_events
        self.streams: dict[str, IndexedStream] = {}
        self.deleted: dict[str, StreamState] = {}
        """The last stream of each name that no stream has now: its group numbers and epochs are not used again."""
        self.leftovers: dict[str, list[Group]] = {}
        """Groups of deleted streams by name, until `purge_deleted` deletes them. The name may be in use again."""
        self.lost_streams: frozenset[str] = frozenset()
        self.problems: list[str] = []
        """Counters that did not fit the groups that `restore` loaded."""
        self._ledger_id = ledger_id
        self._leases = LeaseTable()

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
                self._leases.grant(group, now.monotonic + stream.state.config.lease_seconds)
        lost_groups = list(lost_groups)
        lacking = {group_id.rpartition("/")[0] for group_id in lost_groups}
        for name, stream in self.streams.items():
            stream.state, problems = corrected(stream, is_complete=name not in lacking)
            self.problems += problems
        for group_id in lost_groups:
            if known := self.streams.get(group_id.rpartition("/")[0]):
                known.note_lost(group_id)

    def stream(self, stream: str) -> IndexedStream:
        """Raises NotFound for a stream that was never created, DataLoss for one whose row is damaged."""
        self._require_whole(stream)
        if stream not in self.streams:
            raise NotFound(
                f"there is no stream {shown(stream)}: CreateStream makes one; there are {sorted(self.streams)[:10]}"
            )
        return self.streams[stream]

    def stream_id(self, stream: str) -> str:
        """Names the stream beyond its name: no other stream, of this ledger or another, has the same id."""
        return f"{self.stream(stream).state.created_at}.{self._ledger_id}"

    def require_same(self, stream: str, stream_id: str | None) -> None:
        """Raises Fenced when the stream of this id was deleted and its name is used again. None: any stream will do."""
        if stream_id is None or stream_id == (now_id := self.stream_id(stream)):
            return
        if stream_id.rpartition(".")[2] != self._ledger_id:
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

    def vocab_size(self, group_id: str) -> int | None:
        """The vocabulary of the group's stream; None when it is unknown or the stream does not exist."""
        stream = self.streams.get(group_id.rpartition("/")[0])
        return None if stream is None else stream.state.config.vocab_size

    def needs_reward(self, group_id: str) -> bool:
        """True when samples of the group's stream are trained by their rewards."""
        stream = self.streams.get(group_id.rpartition("/")[0])
        return stream is not None and stream.state.config.needs_reward

    # Streams

    def create_stream(self, now: Instant, state: StreamState) -> Result[bool]:
        """Returns True for a new stream. Raises AlreadyExists when the stream exists with another config."""
        self._require_whole(state.name)
        known = self.streams.get(state.name)
        if known and known.state.config != state.config:
            raise AlreadyExists(
                f"stream {state.name} exists with another config: {_differences(known.state.config, state.config)}; "
                "use another name, or another data directory"
            )
        work = self._work(now)
        if known is None:
            if gone := self.deleted.pop(state.name, None):
                state = replace(state, next_seq=gone.next_seq, first_seq=gone.next_seq, epoch=gone.epoch + 1)
            state = replace(state, created_at=work.position + 1)
            stream = self.streams[state.name] = IndexedStream(state)
            work.set_state(stream, state)
            work.announce(stream, "stream_created")
        return self._done(work, known is None)

    def set_limits(self, now: Instant, limits: StreamConfig) -> Result[None]:
        """Replaces the limits of the stream of that name, and nothing else."""
        work = self._work(now)
        stream = self.stream(limits.name)
        config = stream.state.config.with_limits_of(limits)
        if config != stream.state.config:
            changes = _differences(stream.state.config, config)
            work.set_state(stream, replace(stream.state, config=config))
            work.announce(stream, "limits_changed", detail=changes)
        return self._done(work, None)

    def delete_stream(self, now: Instant, stream: str, *, force: bool, stream_id: str | None = None) -> Result[bool]:
        """True when the stream existed. Its groups are deleted by `purge_deleted`. Raises FailedPrecondition."""
        work = self._work(now)
        indexed = self.streams.get(stream)
        if indexed is None or stream_id not in (None, self.stream_id(stream)):
            return self._done(work, False)
        if indexed.num_groups and not force:
            raise FailedPrecondition(
                f"stream {stream} has {indexed.num_groups} groups that are queued, leased, ready or consumed: "
                "set force to delete them",
                reason="NOT_EMPTY",
            )
        state = self.streams.pop(stream).state
        work.announce(indexed, "stream_deleted", detail=f"with {len(indexed.groups)} groups")
        emptied = StreamState(state.config, state.epoch, next_seq=state.next_seq, deleted=True)
        work.set_state(indexed, emptied)
        self.deleted[stream] = emptied
        self.leftovers.setdefault(stream, []).extend(indexed.groups.values())
        return self._done(work, True)

    def purge_deleted(self, now: Instant, stream: str) -> Result[int]:
        """Deletes a chunk of the groups of deleted streams of this name; returns how many."""
        work = self._work(now)
        groups = self.leftovers.get(stream, [])
        some = groups[-MAX_CHANGES:]
        del groups[-MAX_CHANGES:]
        if not groups:
            self.leftovers.pop(stream, None)
        for group in some:
            work.purge(group)
        return self._done(work, len(some))

    # Producers

    def submit(self, now: Instant, stream: str, prompts: Sequence[Prompt]) -> Result[list[str]]:
        """Returns the ids of the new groups, and of those that existed already."""
        work = self._work(now)
        return self._done(work, prompting.submit(work, self.stream(stream), prompts))

    def check_submit(self, stream: str, prompts: Sequence[Prompt]) -> None:
        """Raises what `submit` raises, so that the prompts can be submitted in chunks afterwards."""
        prompting.check_submit(self.stream(stream), prompts)

    def prompts_wanted(self, stream: str, max_groups: int, *, is_held_back: bool = False) -> Sequence[int]:
        """Returns how many prompts to read from each of the stream's sources so that `max_groups` may be leased."""
        return self.stream(stream).prompts_wanted(max_groups, is_held_back=is_held_back)

    def read(
        self,
        now: Instant,
        stream: str,
        prompts: Sequence[Sequence[Prompt]],
        cursors: Sequence[Cursor],
        ended: Sequence[bool],
        finished: Mapping[str, Finish] = MappingProxyType({}),
    ) -> Result[None]:
        """Makes groups of prompts, READY where they came `finished`; the cursors move in the same transaction."""
        work = self._work(now)
        prompting.read(work, self.stream(stream), prompts, cursors, ended, finished, self._ledger_id)
        return self._done(work, None)

    def lease(
        self, now: Instant, stream: str, producer_id: str, request_id: str, max_groups: int
    ) -> Result[list[Group]]:
        """Returns LEASED groups, or none when `no_lease_reason` says why."""
        work = self._work(now)
        indexed = self.stream(stream)
        return self._done(work, producing.lease(work, indexed, producer_id, request_id, max_groups, self._ledger_id))

    def no_lease_reason(self, stream: str) -> NoLeaseReason | None:
        """Returns why no group may be leased now; None when one may."""
        return producing.no_lease_reason(self.stream(stream))

    def lease_seconds_left(self, now: Instant, lease_id: str) -> float | None:
        """Returns the time until a lease expires; None when it has ended."""
        return self._leases.seconds_left(lease_id, now.monotonic) if self._live(lease_id) else None

    def renew(self, now: Instant, lease_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns (renewed ids, ids of leases that have ended). It is not durable, because deadlines are not."""
        renewed: list[str] = []
        lost: list[str] = []
        for lease_id in lease_ids:
            group = self._live(lease_id)
            if group is None:
                lost.append(lease_id)
                continue
            seconds = self.streams[group.stream].state.config.lease_seconds
            self._leases.renew(lease_id, now.monotonic + seconds)
            renewed.append(lease_id)
        return renewed, lost

    def renew_all(self, now: Instant) -> None:
        """Starts the full time of every lease again, after nobody could renew it."""
        self.renew(now, [group.live_lease.lease_id for group in self._leases.live()])

    def release(self, now: Instant, releases: Sequence[Release]) -> Result[None]:
        """Ends live leases; ended ones are ignored."""
        _check_distinct("lease_id", [r.lease_id for r in releases])
        live = [(group, r) for r in releases if (group := self._live(r.lease_id))]
        adding: dict[str, int] = {}
        for group, given in live:
            num_bytes = sum(p.record.stored_bytes for p in given.partials)
            adding[group.stream] = adding.get(group.stream, 0) + num_bytes
        for stream, num_bytes in adding.items():
            producing.check_bytes(self.streams[stream], num_bytes, self.streams[stream].sample_bytes)
        work = self._work(now)
        for group, given in live:
            producing.release(work, self.streams[group.stream], group, given)
        return self._done(work, None)

    def retry(self, now: Instant, stream: str, request_id: str, group_ids: Sequence[str]) -> Result[Retried]:
        """Queues FAILED groups again; without ids all of them, the latest first, up to the limit of one call."""
        _check_distinct("group_id", group_ids)
        work = self._work(now)
        return self._done(work, retry(work, self.stream(stream), request_id, group_ids))

    def drop(
        self, now: Instant, stream: str, request_id: str, group_ids: Sequence[str], reason: str
    ) -> Result[Dropped]:
        """Makes these groups DROPPED, all or none. Batches that contained one are dissolved."""
        _check_distinct("group_id", group_ids)
        work = self._work(now)
        return self._done(work, drop(work, self.stream(stream), request_id, group_ids, reason))

    def put(self, now: Instant, puts: Sequence[GroupPut]) -> Result[list[PutResult]]:
        """Stores all puts or none. A put of an ended lease is refused in its own result."""
        _check_distinct("group_id", [p.group_id for p in puts])
        _check_distinct("sample_id", [s.record.sample_id for p in puts for s in p.samples])
        work = self._work(now)
        adding: dict[str, int] = {}
        for put in puts:
            stream = self._stream_of(put.group_id)
            adding[stream] = adding.get(stream, 0) + producing.check_put(work, self.streams[stream], put)
        for stream, num_bytes in adding.items():
            producing.check_bytes(self.streams[stream], num_bytes, self.streams[stream].sample_bytes)
        results = [producing.put(work, self.streams[self._stream_of(p.group_id)], p) for p in puts]
        return self._done(work, results)

    def expire_leases(self, now: Instant) -> Result[int]:
        """Ends at most a chunk of the leases that have reached their deadline."""
        work = self._work(now)
        due = self._leases.due(now.monotonic, MAX_CHANGES)
        for group in due:
            if (stream := self._stream_with(group)) is not None:
                producing.expire_lease(work, stream, group)
            else:
                self._leases.end(group.live_lease.lease_id)
        return self._done(work, len(due))

    def next_lease_deadline(self) -> float | None:
        """Returns the monotonic time at which `expire_leases` has work next."""
        return self._leases.next_deadline()

    # The trainer

    def lease_batch(self, now: Instant, stream: str, epoch: int, step: int) -> Result[StepBatch | None]:
        """Returns the step's batch, or None while it is not full."""
        work = self._work(now)
        return self._done(work, training.lease_batch(work, self.stream(stream), epoch, step))

    def is_starved(self, stream: str) -> bool:
        """True when the next batch cannot be filled unless more prompts are submitted."""
        return training.is_starved(self.stream(stream))

    def candidates(self, stream: str, step: int) -> list[Group]:
        """Returns the READY groups, by admission, from which the user's function chooses the batch now."""
        return training.candidates(self.stream(stream), step)

    def choose(
        self, now: Instant, stream: str, epoch: int, step: int, chosen: Sequence[str], dropped: Sequence[str]
    ) -> Result[StepBatch | None]:
        """Returns the step's batch, or None when the choice does not fill it."""
        work = self._work(now)
        return self._done(work, training.choose(work, self.stream(stream), epoch, step, chosen, dropped))

    def consume(self, now: Instant, stream: str, epoch: int, step: int, digest: bytes) -> Result[int]:
        """Returns the next step."""
        work = self._work(now)
        return self._done(work, training.consume(work, self.stream(stream), epoch, step, digest))

    def commit(self, now: Instant, stream: str, epoch: int, step: int) -> Result[int]:
        """Returns the number of groups that became COMMITTED."""
        work = self._work(now)
        return self._done(work, training.commit(work, self.stream(stream), epoch, step))

    def commit_steps(self, stream: str, epoch: int, step: int) -> list[int]:
        """Returns the steps to commit one after the other, so that no command is long; the last is `step`."""
        return training.commit_steps(self.stream(stream), epoch, step)

    def delete_ended(self, now: Instant, stream: str) -> Result[int]:
        """Deletes a chunk of the groups past retention; returns how many."""
        work = self._work(now)
        return self._done(work, training.delete_ended(work, self.stream(stream)))

    def rewind(
        self, now: Instant, stream: str, step: int, request_id: str | None, least_epoch: int = 0, num_back: int = 0
    ) -> Result[tuple[int, int]]:
        """Returns (new epoch, groups that are READY again)."""
        work, indexed = self._work(now), self.stream(stream)
        return self._done(work, training.rewind(work, indexed, step, request_id, least_epoch, num_back=num_back))

    def rewind_steps(self, stream: str, step: int, request_id: str, least_epoch: int) -> list[int]:
        """Returns the steps to rewind to before `step`, so that no command is long."""
        return training.rewind_steps(self.stream(stream), step, request_id, least_epoch)

    def set_policy_version(self, now: Instant, stream: str, epoch: int, policy_version: int) -> Result[int]:
        """Returns the number of groups that expired."""
        work = self._work(now)
        return self._done(work, training.set_policy_version(work, self.stream(stream), epoch, policy_version))

    # Readers

    def sample_records(
        self, stream: str, sample_ids: Sequence[str], *, skip_unknown: bool = False
    ) -> list[SampleRecord]:
        """Returns the records in the order asked. Raises NotFound naming the ids that are deleted or unknown."""
        indexed = self.stream(stream)
        found: list[SampleRecord] = []
        gone: list[str] = []
        of_group: dict[str, Mapping[str, SampleRecord]] = {}
        for sample_id in sample_ids:
            group_id = indexed.samples.get(sample_id)
            if group_id is None or indexed.groups[group_id].state is GroupState.COMMITTED:
                gone.append(sample_id)
                continue
            if group_id not in of_group:
                of_group[group_id] = {record.sample_id: record for record in indexed.groups[group_id].samples}
            found.append(of_group[group_id][sample_id])
        if gone and not skip_unknown:
            some = f"{gone[:10]} and {len(gone) - 10} others" if len(gone) > 10 else f"{gone}"
            raise NotFound(f"stream {stream} has no payload of the samples {some}: never put, expired or committed")
        return found

    def list_groups(
        self, stream: str, states: Sequence[GroupState], before: int | None, count: int
    ) -> tuple[list[Group], int | None]:
        """Newest change first, below position `before`; and where the next page starts, None on the last."""
        order = self.stream(stream).change_order
        end = self.position + 1 if before is None else before
        page = list(islice(order.before(end, states or tuple(GroupState)), count + 1))
        return page[:count], page[count - 1].position if len(page) > count else None

    def _live(self, lease_id: str) -> Group | None:
        """Returns the group under a live lease; None when the lease ended or its stream is deleted."""
        group = self._leases.find(lease_id)
        return group if group and self._stream_with(group) else None

    def _stream_with(self, group: Group) -> IndexedStream | None:
        """None for a group of a deleted stream. Another stream of its name does not have it: ids are not used again."""
        stream = self.streams.get(group.stream)
        return stream if stream and group.group_id in stream.groups else None

    def _require_whole(self, stream: str) -> None:
        if stream in self.lost_streams:
            raise DataLoss(
                f"the ledger's row of stream {stream} is damaged, and nothing of it can go on without: restore a "
                "backup; other streams are served"
            )

    def _work(self, now: Instant) -> Work:
        return Work(now, self.position, self._leases)

    def _done(self, work: Work, answer: _Answer) -> Result[_Answer]:
        self.position = work.position
        self._delete_events(work.transaction)
        return answer, work.transaction

    def _delete_events(self, transaction: Transaction) -> None:
        if self._retain_events is None or not transaction.events:
            return
        oldest = self.position + 1 - self._retain_events
        if oldest > self.oldest_position + self._retain_events // _EVENTS_FORGOTTEN_SHARE:
            self.oldest_position = transaction.events_from = oldest

    def _stream_of(self, group_id: str) -> str:
        stream = group_id.rpartition("/")[0]
        self._require_whole(stream)
        if stream not in self.streams:
            raise NotFound(f"there is no group {shown(group_id)}")
        return stream


def _check_distinct(name: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        twice = Counter(values).most_common(1)[0][0]
        raise InvalidArgument(f"{name} {twice} comes twice in one call", field=name)


def _differences(old: StreamConfig, new: StreamConfig) -> str:
    names = [n for n in StreamConfig.__slots__ if getattr(old, n) != getattr(new, n)]
    return ", ".join(f"{n} is {getattr(old, n)!r}, now {getattr(new, n)!r}" for n in names)
