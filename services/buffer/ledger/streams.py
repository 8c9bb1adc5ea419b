"""Commands on whole streams: create, change limits, delete, purge."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.errors import AlreadyExists, FailedPrecondition
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.ledger.work import MAX_CHANGES, Work


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
