"""One running command: it changes streams through a Work, which collects every change in the transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from headrace.errors import InvalidArgument
from headrace.trajectory import Failure
from services.buffer.ledger.admission import oldest_trainable
from services.buffer.ledger.group import EndedLease, Group, GroupState, NewSample, SampleRecord
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.state import Instant, LedgerEvent, LedgerState, Transaction
from services.buffer.ledger.stream import ExpiryAction, StreamState

MAX_CHANGES = 1_024
"""How many groups one command expires, commits, deletes or rewinds before other commands run."""
_MAX_REMEMBERED = 256
_EVENTS_FORGOTTEN_SHARE = 8
"""Old events are deleted when an eighth of retain_events has gathered."""


class Work:
    """A command checks first and changes last: after its first change it must not raise."""

    def __init__(self, ledger: LedgerState, now: Instant) -> None:
        self.ledger = ledger
        self.now = now
        self.position = ledger.position
        self.leases = ledger.leases
        self.transaction = Transaction()

    def set_state(self, stream: IndexedStream, state: StreamState) -> None:
        stream.state = state
        self.transaction.streams[state.name] = state

    def change(
        self,
        stream: IndexedStream,
        group: Group,
        kind: str,
        *,
        sample_ids: Sequence[str] = (),
        step: int | None = None,
        detail: str = "",
    ) -> Group:
        """Replaces a group and adds the event `kind`. `step` is set where it is not the group's own."""
        if step is None:
            step = group.ended_step if group.step is None else group.step
        self.position = position = self.position + 1
        admitted_at = position if kind == "leased" else group.admitted_at
        group = replace(group, position=position, admitted_at=admitted_at)
        stream.place(group)
        self.transaction.groups[group.group_id] = group
        self.transaction.events.append(
            LedgerEvent(
                position=position,
                unix_seconds=self.now.unix,
                stream=group.stream,
                kind=kind,
                group_id=group.group_id,
                state=group.state,
                epoch=stream.state.epoch or None,
                step=step,
                policy_version=group.oldest_version,
                sample_ids=tuple(sample_ids),
                detail=detail,
            )
        )
        return group

    def add(self, stream: IndexedStream, group: Group) -> Group:
        """Adds a new group, QUEUED."""
        self.transaction.new_groups.append(group.group_id)
        return self.change(stream, group, "submitted", detail=f"prompt {group.prompt.prompt_id}")

    def announce(self, stream: IndexedStream, kind: str, *, step: int | None = None, detail: str = "") -> None:
        """Adds an event of the stream itself."""
        state = stream.state
        self.position += 1
        self.transaction.events.append(
            LedgerEvent(
                position=self.position,
                unix_seconds=self.now.unix,
                stream=state.name,
                kind=kind,
                epoch=state.epoch or None,
                step=state.step if step is None else step,
                policy_version=state.policy_version,
                detail=detail,
            )
        )

    def store_payloads(self, samples: Iterable[NewSample]) -> None:
        for sample in samples:
            self.transaction.payloads[sample.record.key] = sample.payload
            if sample.columns:
                self.transaction.with_columns.append(sample)

    def delete_group(self, stream: IndexedStream, group_id: str) -> Group:
        """Deletes an ended group from memory and from the store."""
        group = stream.delete(group_id)
        self.transaction.forgotten.append(group)
        return group

    def purge(self, group: Group) -> None:
        """Deletes a group of a deleted stream from the store, with its lease and its payloads."""
        if group.lease and self.leases.find(group.lease.lease_id):
            self.leases.end(group.lease.lease_id)
        self.delete_payloads(group.records)
        self.transaction.forgotten.append(group)

    def delete_payloads(self, records: Iterable[SampleRecord]) -> None:
        self.transaction.deleted_payloads.extend(record.key for record in records)

    def end_lease(self, group: Group, fingerprint: bytes | None = None) -> Group:
        """Returns the group without its lease. A fingerprint lets a repeated put be recognized."""
        lease_id = group.live_lease.lease_id
        self.leases.end(lease_id)
        ended = (*group.ended, EndedLease(lease_id, fingerprint)) if fingerprint else group.ended
        return replace(group, lease=None, ended=ended)

    def requeue_or_fail(self, stream: IndexedStream, group: Group, kind: str, failure: Failure) -> Group:
        """Ends an attempt: the group is queued at the front, or FAILED when this was its last attempt."""
        if group.attempts < stream.state.config.max_attempts:
            queued = replace(group, state=GroupState.QUEUED)
            return self.change(stream, queued, kind, detail=f"{failure.reason}: {failure.message}")
        self.delete_payloads(group.partials)
        failed = replace(group, state=GroupState.FAILED, failure=failure, partials=())
        return self.change(stream, failed, "failed", detail=f"{failure.reason}: {failure.message}")

    def drop(self, stream: IndexedStream, group: Group, failure: Failure) -> Group:
        """Makes a group DROPPED and deletes its payloads."""
        self.delete_payloads((*group.samples, *group.partials))
        dropped = replace(
            group,
            state=GroupState.DROPPED,
            failure=failure,
            samples=(),
            partials=(),
            oldest_version=None,
            step=None,
            batch_index=None,
            ended_step=stream.state.step,
        )
        return self.change(stream, dropped, "dropped", detail=f"{failure.reason}: {failure.message}")

    def expire_stale(self, stream: IndexedStream, step: int) -> int:
        """Expires at most a chunk of the READY groups that are too stale for `step`."""
        oldest = oldest_trainable(stream.state, step)
        stale = stream.queues.older_than(oldest, MAX_CHANGES) if oldest is not None else []
        for group_id in stale:
            self.expire(stream, stream.groups[group_id], step)
        return len(stale)

    def expire(self, stream: IndexedStream, group: Group, step: int) -> Group:
        """Queues a group that is too stale again (without counting an attempt), or drops it."""
        message = (
            f"its oldest token is of policy version {group.oldest_version}, step {step} trains "
            f"{oldest_trainable(stream.state, step)} or newer (max_staleness {stream.state.config.max_staleness})"
        )
        self.delete_payloads(group.samples)
        bare = replace(group, samples=(), oldest_version=None)
        if stream.state.config.expiry_action is ExpiryAction.DROP:
            failure = Failure("EXPIRED", message)
            dropped = replace(bare, state=GroupState.DROPPED, failure=failure, ended_step=stream.state.step)
            return self.change(stream, dropped, "expired", detail=message)
        queued = replace(bare, state=GroupState.QUEUED, attempts=group.attempts - 1)
        return self.change(stream, queued, "expired", detail=message)


_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")
Result = tuple[_Answer, Transaction]
Command = Callable[Concatenate["LedgerState", Instant, _P], Result[_Answer]]
"""(ledger, now, request) → (answer, transaction)."""


def command(function: Callable[Concatenate[Work, _P], _Answer]) -> Command[_P, _Answer]:
    """Makes a function that changes the ledger through a Work a command: (ledger, now, …) → (answer, transaction)."""

    @wraps(function)
    def run(ledger: LedgerState, now: Instant, /, *args: _P.args, **kwargs: _P.kwargs) -> Result[_Answer]:
        work = Work(ledger, now)
        answer = function(work, *args, **kwargs)
        return answer, _finished(work)

    return run


def command_of_stream(
    function: Callable[Concatenate[Work, IndexedStream, _P], _Answer],
) -> Callable[Concatenate[LedgerState, Instant, str, _P], Result[_Answer]]:
    """As `command`, for a function of one stream: callers name it."""

    @wraps(function)
    def run(ledger: LedgerState, now: Instant, stream: str, /, *args: _P.args, **kwargs: _P.kwargs) -> Result[_Answer]:
        work = Work(ledger, now)
        answer = function(work, ledger.stream(stream), *args, **kwargs)
        return answer, _finished(work)

    return run


def _finished(work: Work) -> Transaction:
    ledger, keep = work.ledger, work.ledger.retain_events
    ledger.position = work.position
    if keep is not None and work.transaction.events:
        oldest = ledger.position + 1 - keep
        if oldest > ledger.oldest_position + keep // _EVENTS_FORGOTTEN_SHARE:
            ledger.oldest_position = work.transaction.events_from = oldest
    return work.transaction


def require_distinct(name: str, values: Sequence[str]) -> None:
    """Raises InvalidArgument naming what comes twice."""
    if len(set(values)) < len(values):
        twice = Counter(values).most_common(1)[0][0]
        raise InvalidArgument(f"{name} {twice} comes twice in one call", field=name)


def remembered(answers: Mapping[str, _Answer], request_id: str, answer: _Answer) -> dict[str, _Answer]:
    """Adds a request's answer, which a repeated request gets again; the oldest answers are forgotten."""
    return {**dict(list(answers.items())[1 - _MAX_REMEMBERED :]), request_id: answer}
