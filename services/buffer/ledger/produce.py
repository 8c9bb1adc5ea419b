"""Commands of producers: prompts in, leases out, puts in.

A lease is exclusive while it lives and ends by put, release or expiry. A group is put whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from headrace.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from headrace.limits import MAX_SAMPLES_PER_STEP, shown
from headrace.trajectory import Failure
from services.buffer.ledger.admission import oldest_trainable
from services.buffer.ledger.group import Group, GroupState, Lease, NewSample, Prompt, first_within
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.stream import Cursor
from services.buffer.ledger.work import MAX_CHANGES, Work, require_distinct

_DATA_SOURCE = "data source"


class PutOutcome(StrEnum):
    """The outcome that a producer reports."""

    COMPLETE = "COMPLETE"
    DROPPED = "DROPPED"
    FAILED = "FAILED"


class NoLeaseReason(StrEnum):
    """The reason why no group was leased."""

    ADMISSION = "ADMISSION"
    NO_PROMPTS = "NO_PROMPTS"
    EXHAUSTED = "EXHAUSTED"
    BYTES = "BYTES"
    LIMITER = "LIMITER"


class GroupPut(msgspec.Struct, frozen=True, gc=False):
    """A producer's result for a leased group."""

    lease_id: str
    group_id: str
    outcome: PutOutcome
    samples: tuple[NewSample, ...] = ()
    failure: Failure | None = None
    rewards: tuple[float, ...] = ()

    @property
    def fingerprint(self) -> bytes:
        """Two puts with equal envelopes (payload digests, rewards, versions, tags, …) have equal fingerprints."""
        digest = hashlib.sha256(self.outcome.value.encode())
        envelopes = [sample.record.envelope for sample in self.samples]
        digest.update(b"".join([part for body in envelopes for part in (len(body).to_bytes(8, "little"), body)]))
        return digest.digest()[:16]


class PutResult(msgspec.Struct, frozen=True, gc=False):
    """The ledger's answer to a put."""

    group_id: str
    state: GroupState | None
    """None for a group that was deleted since."""
    duplicate: bool = False
    refused: Failure | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """A lease returned unfinished, with the tokens generated so far."""

    lease_id: str
    partials: tuple[NewSample, ...] = ()
    reason: str = ""


Finish = Callable[[str, str], tuple[NewSample, ...]]
"""(group id, lease id) → the samples of a group that came finished; checked before, so that it does not raise."""


def submit(work: Work, stream: IndexedStream, prompts: Sequence[Prompt]) -> list[str]:
    """Makes one group for each prompt; all of them or none."""
    _add_groups(work, stream, check_submit(stream, prompts))
    return [stream.prompts[prompt.prompt_id] for prompt in prompts]


def check_submit(stream: IndexedStream, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts that are new. Raises unless all of them can be stored."""
    new: dict[str, Prompt] = {}
    for prompt in prompts:
        known = stream.groups[stream.prompts[prompt.prompt_id]].prompt if prompt.prompt_id in stream.prompts else None
        earlier = known or new.setdefault(prompt.prompt_id, prompt)
        if earlier.body != prompt.body:
            raise AlreadyExists(
                f"prompt {prompt.prompt_id} was submitted to {stream.state.name} before with another content: "
                "give it another prompt_id"
            )
    check_room(stream, len(new))
    _check_bytes(stream, sum([len(prompt.body) for prompt in new.values()]), stream.stored_bytes)
    return list(new.values())


def check_room(stream: IndexedStream, num_groups: int) -> None:
    """Raises ResourceExhausted when `num_groups` more groups exceed one of the stream's limits."""
    limit = stream.state.config.max_queued_groups
    if stream.queues.num_queued + num_groups > limit:
        raise ResourceExhausted(
            f"stream {stream.state.name} has {stream.queues.num_queued} groups queued, {num_groups} more exceed "
            f"max_queued_groups {limit}: submit again when producers have taken some",
            retry_after_seconds=1.0,
        )
    room = stream.state.config.max_groups - stream.num_groups
    if num_groups > room:
        raise ResourceExhausted(
            f"stream {stream.state.name} holds {stream.num_groups} groups, {num_groups} more exceed max_groups "
            f"{stream.state.config.max_groups}: submit again when some were committed",
            retry_after_seconds=1.0,
        )


def read(
    work: Work,
    stream: IndexedStream,
    prompts: Sequence[Sequence[Prompt]],
    cursors: Sequence[Cursor],
    ended: Sequence[bool],
    finished: Mapping[str, Finish] = MappingProxyType({}),
) -> None:
    """Makes groups of the prompts read from each source, and moves the cursors with them.

    `finished` has those that are READY at once, by prompt id.
    """
    for prompt in chain.from_iterable(prompts):
        if prompt.prompt_id in stream.prompts:
            raise AlreadyExists(
                f"prompt {prompt.prompt_id} of {stream.state.name}'s source was submitted before: "
                "submitted prompts need ids of their own"
            )
    for source, those in enumerate(prompts):
        _add_groups(work, stream, those, source)
    state = replace(stream.state, cursors=tuple(cursors), ended=tuple(ended), exhausted=all(ended))
    work.set_state(stream, state)
    for prompt_id, finish in finished.items():
        _finish(work, stream, stream.groups[stream.prompts[prompt_id]], finish)


def _finish(work: Work, stream: IndexedStream, group: Group, finish: Finish) -> None:
    """Finishes the group as if a producer had leased and put it."""
    stream.queues.discard_queued(group)
    leased = _grant(work, stream, group, _DATA_SOURCE, "")
    samples = finish(group.group_id, leased.live_lease.lease_id)
    _complete(work, stream, work.end_lease(leased), samples, leased.live_lease.policy_version)


def _add_groups(work: Work, stream: IndexedStream, prompts: Sequence[Prompt], source: int | None = None) -> None:
    if not prompts:
        return
    seq = stream.state.next_seq
    work.set_state(stream, replace(stream.state, next_seq=seq + len(prompts)))
    config = stream.state.config
    for i, prompt in enumerate(prompts, seq):
        number = i * config.num_shards + config.shard
        work.add(stream, Group(f"{config.name}/{number}", config.name, i, prompt, source=source))


def lease(work: Work, stream: IndexedStream, producer_id: str, request_id: str, max_groups: int) -> list[Group]:
    """Leases at most `max_groups` groups that fit one answer. A repeated request gets its live leases again."""
    held = [g for g in work.leases.of_request(stream.state.name, request_id) if g.group_id in stream.groups]
    if held or no_lease_reason(stream) is not None:
        return held
    most = stream.state.config.max_leases
    room = most - stream.counts[GroupState.LEASED]
    if room <= 0:
        raise ResourceExhausted(
            f"{most} leases of {stream.state.name} are live, which is max_leases: put or release some first"
        )
    slots = stream.slots_left()
    count = min(max_groups, room) if slots is None else min(max_groups, room, slots)
    return [
        _grant(work, stream, group, producer_id, request_id)
        for group in _answerable(stream, stream.queues.take_queued(stream.state, count))
    ]


def _answerable(stream: IndexedStream, group_ids: Sequence[str]) -> list[Group]:
    """Returns the first groups that fit one answer, and queues the others again where they were."""
    groups = [stream.groups[group_id] for group_id in group_ids]
    fitting = first_within(groups, lambda group: group.lease_bytes)
    for group in groups[len(fitting) :]:
        stream.queues.enqueue(group)
    return fitting


def _grant(work: Work, stream: IndexedStream, group: Group, producer_id: str, request_id: str) -> Group:
    """Makes a group LEASED that is in no queue."""
    number = group.num_leases + 1
    lease_id = f"{group.group_id}#{number}.{work.ledger.ledger_id}"
    lease = Lease(lease_id, producer_id, request_id, stream.state.policy_version)
    leased = replace(group, state=GroupState.LEASED, lease=lease, num_leases=number, attempts=group.attempts + 1)
    leased = work.change(stream, leased, "leased", detail=f"lease {lease_id} to {producer_id}")
    work.leases.grant(leased, work.now.monotonic + stream.state.config.lease_seconds)
    return leased


def no_lease_reason(stream: IndexedStream) -> NoLeaseReason | None:
    """Returns why no group may be leased now; None when one may."""
    if stream.admitted_left() == 0:
        return NoLeaseReason.ADMISSION
    if stream.inserts_left() == 0:
        return NoLeaseReason.LIMITER
    if stream.sample_bytes >= stream.state.config.max_payload_bytes:
        return NoLeaseReason.BYTES
    if stream.queues.num_queued:
        return None
    return NoLeaseReason.EXHAUSTED if stream.state.exhausted else NoLeaseReason.NO_PROMPTS


def release(work: Work, releases: Sequence[Release]) -> None:
    """Ends live leases; ended ones are ignored."""
    require_distinct("lease_id", [r.lease_id for r in releases])
    live = [(group, r) for r in releases if (group := work.ledger.live(r.lease_id))]
    adding: defaultdict[str, int] = defaultdict(int)
    for group, given in live:
        adding[group.stream] += sum(p.record.stored_bytes for p in given.partials)
    _check_sample_bytes(work, adding)
    for group, given in live:
        _release(work, work.ledger.streams[group.stream], group, given)


def _release(work: Work, stream: IndexedStream, group: Group, given: Release) -> None:
    """Queues the group again, at the front. The lease does not count as an attempt."""
    if given.partials:
        work.delete_payloads(group.partials)
        work.store_payloads(given.partials)
    partials = tuple(p.record for p in given.partials) or group.partials
    queued = replace(
        work.end_lease(group),
        state=GroupState.QUEUED,
        attempts=group.attempts - 1,
        partials=partials,
    )
    work.change(stream, queued, "released", detail=given.reason)
    stream.production.returned(given.reason)


def expire_leases(work: Work) -> int:
    """Ends at most a chunk of the leases that have reached their deadline."""
    due = work.leases.due(work.now.monotonic, MAX_CHANGES)
    for group in due:
        if (stream := work.ledger.stream_with(group)) is not None:
            _expire_lease(work, stream, group)
        else:
            work.leases.end(group.live_lease.lease_id)
    return len(due)


def _expire_lease(work: Work, stream: IndexedStream, group: Group) -> None:
    seconds = stream.state.config.lease_seconds
    failure = Failure(
        "LEASE_EXPIRED", f"producer {group.live_lease.producer_id} did not renew its lease for {seconds:g} s"
    )
    work.requeue_or_fail(stream, work.end_lease(group), "lease_expired", failure)
    stream.production.returned(f"{failure.reason}: {failure.message}")


def put(work: Work, puts: Sequence[GroupPut]) -> list[PutResult]:
    """Stores all puts or none. A put of an ended lease is refused in its own result."""
    require_distinct("group_id", [p.group_id for p in puts])
    require_distinct("sample_id", [s.record.sample_id for p in puts for s in p.samples])
    streams = [_stream_of(work, put.group_id) for put in puts]
    adding: defaultdict[str, int] = defaultdict(int)
    for stream, put in zip(streams, puts, strict=True):
        adding[stream.state.name] += _check_put(stream, put)
    _check_sample_bytes(work, adding)
    return [_put(work, stream, put) for stream, put in zip(streams, puts, strict=True)]


def _stream_of(work: Work, group_id: str) -> IndexedStream:
    stream = group_id.rpartition("/")[0]
    work.ledger.require_whole(stream)
    if stream not in work.ledger.streams:
        raise NotFound(f"there is no group {shown(group_id)}")
    return work.ledger.streams[stream]


def _check_put(stream: IndexedStream, put: GroupPut) -> int:
    """Raises unless the put can be answered. Returns the payload bytes that it adds."""
    group = _find(stream, put.group_id)
    if group is None or _was_answered(group, put):
        return 0  # even where the group was expired since and generated again under the same sample ids
    _check_samples(stream, put)
    _check_versions(stream, put)
    if _is_duplicate(stream, group, put) or not _is_live(group, put):
        return 0
    return sum([s.record.stored_bytes for s in put.samples])


def _check_sample_bytes(work: Work, adding: Mapping[str, int]) -> None:
    for stream, num_bytes in adding.items():
        _check_bytes(work.ledger.streams[stream], num_bytes, work.ledger.streams[stream].sample_bytes)


def _check_bytes(stream: IndexedStream, num_bytes: int, held_bytes: int) -> None:
    """Raises ResourceExhausted when `num_bytes` more bytes exceed max_payload_bytes.

    Prompts count for submissions and not for puts: a full queue must not keep finished samples out.
    """
    limit = stream.state.config.max_payload_bytes
    if num_bytes and held_bytes + num_bytes > limit:
        raise ResourceExhausted(
            f"stream {stream.state.name} holds {held_bytes} bytes, {num_bytes} more exceed "
            f"max_payload_bytes {limit}: raise it, or save checkpoints more often",
            retry_after_seconds=1.0,
        )


def _put(work: Work, stream: IndexedStream, put: GroupPut) -> PutResult:
    """Ends the lease with a put that was checked."""
    group = _find(stream, put.group_id)
    if group is None:
        gone = Failure("LEASE_LOST", f"lease {put.lease_id} has ended: its group is no longer leased")
        return PutResult(put.group_id, None, refused=gone)
    if _is_duplicate(stream, group, put):
        return PutResult(group.group_id, group.state, duplicate=True)
    if not _is_live(group, put):
        refused = Failure("LEASE_LOST", f"lease {put.lease_id} has ended: another producer has its group now")
        return PutResult(group.group_id, group.state, refused=refused)
    ended = work.end_lease(group, put.fingerprint)
    num_samples = stream.state.config.n_samples_per_prompt
    failure = put.failure or Failure(put.outcome.value, "no reason was given")
    match put.outcome:
        case PutOutcome.COMPLETE:
            done = _complete(work, stream, ended, put.samples, group.live_lease.policy_version)
            stream.production.completed(group.group_id, [(s.failure, s.record.reward) for s in put.samples])
        case PutOutcome.DROPPED:
            done = work.drop(stream, ended, failure)
            stream.production.dropped(group.group_id, failure, num_samples, put.rewards)
        case PutOutcome.FAILED:
            done = work.requeue_or_fail(stream, ended, "failed", failure)
            stream.production.failed(group.group_id, failure, num_samples)
    return PutResult(done.group_id, done.state)


def _complete(
    work: Work, stream: IndexedStream, group: Group, samples: Sequence[NewSample], leased_version: int
) -> Group:
    """Makes a group READY that is no longer leased; one that is too stale by now expires."""
    records = tuple(s.record for s in samples)
    oldest = min((r.oldest_version for r in records if r.oldest_version is not None), default=leased_version)
    work.delete_payloads(group.partials)
    ready = replace(group, state=GroupState.READY, samples=records, partials=(), oldest_version=oldest)
    limit = oldest_trainable(stream.state, stream.state.step)
    ready = work.change(stream, ready, "put", sample_ids=[r.sample_id for r in records])
    if limit is not None and oldest < limit:
        return work.expire(stream, ready, stream.state.step)
    work.store_payloads(samples)
    work.set_state(stream, replace(stream.state, num_inserted=stream.state.num_inserted + 1))
    return ready


def _find(stream: IndexedStream, group_id: str) -> Group | None:
    """Returns None for a group that was deleted since: a repeated put may arrive that late."""
    group = stream.groups.get(group_id)
    if group is None and not 0 <= stream.seq_of(group_id) < stream.state.next_seq:
        raise NotFound(f"stream {stream.state.name} never had a group {group_id}")
    return group


def _check_samples(stream: IndexedStream, put: GroupPut) -> None:
    if put.outcome is not PutOutcome.COMPLETE:
        return
    wanted = stream.state.config.n_samples_per_prompt
    if len(put.samples) < wanted:
        raise InvalidArgument(
            f"group {put.group_id} comes with {len(put.samples)} samples, n_samples_per_prompt is {wanted}: "
            "put it whole, failed samples included",
            field="groups.samples",
        )
    most = MAX_SAMPLES_PER_STEP // stream.state.config.groups_per_step
    if len(put.samples) > most:
        raise InvalidArgument(
            f"group {put.group_id} comes with {len(put.samples)} samples, one of {stream.state.config.groups_per_step} "
            f"groups of a step may have {most}: a batch has {MAX_SAMPLES_PER_STEP} at most",
            field="groups.samples",
        )
    kept = {record.sample_id: record for record in stream.groups[put.group_id].samples}
    for sample in put.samples:
        record = sample.record
        if record.sample_id not in stream.samples:
            continue
        group_id = stream.samples[record.sample_id]
        if group_id != put.group_id or kept[record.sample_id].envelope != record.envelope:
            raise AlreadyExists(
                f"sample {record.sample_id} was stored before, in group {group_id}, with another content "
                "(payload, reward, versions or tags): a new sample needs a new sample_id"
            )


def _check_versions(stream: IndexedStream, put: GroupPut) -> None:
    """Refuses tokens of a policy version that the trainer has not announced: its publication may be refused.

    A producer may put its group a moment before the announcement; it repeats the put.
    """
    newest = max((s.newest_version for s in put.samples if s.newest_version is not None), default=0)
    if newest > (served := stream.state.policy_version):
        raise InvalidArgument(
            f"group {put.group_id} has tokens of policy version {newest}, version {served} is served",
            field="groups.samples.envelope.policy_ranges",
            reason="VERSION_NOT_SERVED",
        )


def _is_live(group: Group, put: GroupPut) -> bool:
    return group.lease is not None and group.lease.lease_id == put.lease_id


def _is_duplicate(stream: IndexedStream, group: Group, put: GroupPut) -> bool:
    if _is_live(group, put):
        return False
    if _was_answered(group, put):
        return True
    kept = {r.sample_id for r in group.samples}
    return bool(kept) and kept == {s.record.sample_id for s in put.samples}


def _was_answered(group: Group, put: GroupPut) -> bool:
    return any(e.lease_id == put.lease_id and e.fingerprint == put.fingerprint for e in group.ended)
