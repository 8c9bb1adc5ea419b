"""Protos to the domain and back. Whatever arrives is checked here, once."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.trajectory import Failure, from_json
from services.buffer.group import Group, GroupState, Prompt, SampleRecord, payload_key
from services.buffer.producing import GroupPut, NoLeaseReason, PutOutcome, PutResult, Release
from services.buffer.transaction import LedgerEvent, Payload
from services.buffer.wire_bytes import RawPut, RawSample
from services.buffer.wire_checks import require, require_some
from services.buffer.work import NewSample

_OUTCOMES = {
    pb.PUT_OUTCOME_COMPLETE: PutOutcome.COMPLETE,
    pb.PUT_OUTCOME_DROPPED: PutOutcome.DROPPED,
    pb.PUT_OUTCOME_FAILED: PutOutcome.FAILED,
}
_STATES = {pb.GroupState.Value(f"GROUP_STATE_{state.name}"): state for state in GroupState}
_STATE_NUMBERS = {state: number for number, state in _STATES.items()}
_UNFINISHED = (sample_pb2.SAMPLE_STATUS_ABORTED, sample_pb2.SAMPLE_STATUS_PENDING)


def to_prompt(message: sample_pb2.Prompt, i: int) -> Prompt:
    """A prompt with an id and a content."""
    field = f"prompts[{i}]"
    require(message.prompt_id, f"{field}.prompt_id")
    if message.WhichOneof("content") is None:
        raise InvalidArgument(f"prompt {message.prompt_id} has neither text nor messages", field=f"{field}.content")
    if message.WhichOneof("content") == "messages":
        require_some(len(message.messages.messages), f"{field}.messages")
    from_json(message.metadata_json)
    return Prompt(message.prompt_id, message.SerializeToString(deterministic=True), message.priority)


def from_prompt(prompt: Prompt) -> sample_pb2.Prompt:
    """As it was submitted."""
    return sample_pb2.Prompt.FromString(prompt.body)


def to_put(put: RawPut) -> GroupPut:
    """Checked by itself, but for its payloads' digests."""
    message = put.rest
    group_id = require(message.group_id, "groups.group_id")
    if message.outcome not in _OUTCOMES:
        raise InvalidArgument(f"the put of {group_id} has no outcome known here", field="groups.outcome")
    outcome = _OUTCOMES[message.outcome]
    if outcome is PutOutcome.COMPLETE:
        require_some(len(put.samples), "groups.samples")
    elif not message.HasField("failure"):
        raise InvalidArgument(f"the put of {group_id} is {outcome.value} and does not say why", field="groups.failure")
    samples = put.samples if outcome is PutOutcome.COMPLETE else ()
    return GroupPut(
        lease_id=require(message.lease_id, "groups.lease_id"),
        group_id=group_id,
        outcome=outcome,
        samples=tuple(_to_finished(s, group_id, payload_key(message.lease_id, i)) for i, s in enumerate(samples)),
        failure=Failure(message.failure.reason, message.failure.message) if message.HasField("failure") else None,
    )


def _to_finished(sample: RawSample, group_id: str, key: str) -> NewSample:
    envelope = _parse_envelope(sample.envelope)
    _check_finished(envelope)
    return _to_sample(sample, envelope, group_id, key)


def _parse_envelope(data: bytes) -> sample_pb2.SampleEnvelope:
    try:
        return sample_pb2.SampleEnvelope.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"the {len(data)} bytes of an envelope are none: {error}",
            field="groups.samples.envelope",
            reason="MALFORMED_REQUEST",
        ) from error


def to_release(message: pb.LeaseRelease) -> Release:
    """A lease given back."""
    lease_id = require(message.lease_id, "releases.lease_id")
    partials = tuple(
        _to_sample(RawSample(b"", s.payload), s.envelope, s.envelope.group_id, payload_key(lease_id, i))
        for i, s in enumerate(message.partial_samples)
    )
    return Release(lease_id, partials, message.reason)


def _to_sample(sample: RawSample, envelope: sample_pb2.SampleEnvelope, group_id: str, key: str) -> NewSample:
    sample_id = require(envelope.sample_id, "samples.envelope.sample_id")
    if envelope.group_id != group_id:
        raise InvalidArgument(
            f"sample {envelope.sample_id} says group {envelope.group_id!r} and comes with group {group_id!r}",
            field="samples.envelope.group_id",
        )
    _check_status(envelope)
    return NewSample(
        SampleRecord(
            key=key,
            sample_id=sample_id,
            index=envelope.index,
            digest=envelope.digest,
            payload_bytes=envelope.payload_bytes,
            oldest_version=_oldest_trained(envelope),
            envelope=sample.envelope or envelope.SerializeToString(deterministic=True),
            reward=envelope.reward if envelope.HasField("reward") and not envelope.HasField("failure") else None,
        ),
        sample.payload,
        tuple([column.sha256 for column in envelope.out_of_line]),
    )


def _check_finished(envelope: sample_pb2.SampleEnvelope) -> None:
    if envelope.status in _UNFINISHED:
        raise InvalidArgument(
            f"sample {envelope.sample_id} is not finished, and its group is put as COMPLETE: release the lease with "
            "partial_samples, or put the group as FAILED",
            field="groups.samples.envelope.status",
        )


def _oldest_trained(envelope: sample_pb2.SampleEnvelope) -> int | None:
    oldest: int | None = None
    for r in envelope.policy_ranges:
        if r.end > r.start and not r.masked and (oldest is None or r.policy_version < oldest):
            oldest = r.policy_version
    return oldest


def _check_status(envelope: sample_pb2.SampleEnvelope) -> None:
    if envelope.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        raise InvalidArgument(f"sample {envelope.sample_id} has no status", field="samples.envelope.status")
    is_failed = envelope.status == sample_pb2.SAMPLE_STATUS_FAILED
    if is_failed != envelope.HasField("failure"):
        raise InvalidArgument(
            f"sample {envelope.sample_id} must have a failure exactly when its status is FAILED",
            field="samples.envelope.failure",
        )


def from_put_result(result: PutResult) -> pb.PutResult:
    """What became of a put."""
    return pb.PutResult(
        group_id=result.group_id,
        state=from_state(result.state),
        duplicate=result.duplicate,
        refused=_from_failure(result.refused),
    )


def from_sample(record: SampleRecord, payload: Payload) -> sample_pb2.Sample:
    """As it was put."""
    return sample_pb2.Sample(envelope=from_record(record), payload=bytes(payload))


def from_record(record: SampleRecord) -> sample_pb2.SampleEnvelope:
    """The envelope as it was put."""
    return sample_pb2.SampleEnvelope.FromString(record.envelope)


def from_lease(
    group: Group, seconds_left: float, n_samples: int, partials: Sequence[sample_pb2.Sample]
) -> pb.GroupLease:
    """A LEASED group in its producer's hands."""
    assert group.lease is not None
    return pb.GroupLease(
        lease_id=group.lease.lease_id,
        group_id=group.group_id,
        prompt=from_prompt(group.prompt),
        n_samples=n_samples,
        attempt=group.attempts,
        lease_seconds=seconds_left,
        policy_version=group.lease.policy_version,
        partial_samples=partials,
    )


def from_group(group: Group) -> pb.Group:
    """A group as ListGroups shows it."""
    return pb.Group(
        group_id=group.group_id,
        state=from_state(group.state),
        prompt=from_prompt(group.prompt),
        samples=[from_record(record) for record in group.samples],
        attempts=group.attempts,
        step=group.step,
        failure=_from_failure(group.failure),
        position=group.position,
    )


def from_event(event: LedgerEvent) -> pb.LedgerEvent:
    """One line of the history."""
    message = pb.LedgerEvent(
        position=event.position,
        stream=event.stream,
        group_id=event.group_id or "",
        kind=event.kind,
        state=from_state(event.state) if event.state else pb.GROUP_STATE_UNSPECIFIED,
        epoch=event.epoch or 0,
        step=event.step,
        policy_version=event.policy_version,
        sample_ids=event.sample_ids,
        detail=event.detail,
    )
    message.time.FromNanoseconds(int(event.unix_seconds * 1e9))
    return message


def from_state(state: GroupState) -> pb.GroupState.ValueType:
    """Its number on the wire."""
    return _STATE_NUMBERS[state]


def to_states(numbers: Sequence[pb.GroupState.ValueType]) -> list[GroupState]:
    """Raises InvalidArgument for a state unknown here."""
    unknown = [n for n in numbers if n not in _STATES]
    if unknown:
        raise InvalidArgument(f"states {unknown} are not known here", field="states")
    return [_STATES[n] for n in numbers]


def from_no_lease_reason(reason: NoLeaseReason | None) -> pb.NoLeaseReason.ValueType:
    """Its number on the wire; UNSPECIFIED for none."""
    if reason is None:
        return pb.NO_LEASE_REASON_UNSPECIFIED
    return pb.NoLeaseReason.Value(f"NO_LEASE_REASON_{reason.name}")


def to_page_token(token: str) -> int | None:
    """A position; None for the first page."""
    if not token:
        return None
    if not token.isdecimal():
        raise InvalidArgument(f"page_token {token[:40]!r} is none that ListGroups gave out", field="page_token")
    return int(token)


def _from_failure(failure: Failure | None) -> sample_pb2.Failure | None:
    return sample_pb2.Failure(reason=failure.reason, message=failure.message) if failure else None
