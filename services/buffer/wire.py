"""Protos become the ledger's types and back. Everything that arrives is checked here, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.limits import (
    MAX_COLUMN_BYTES,
    MAX_COLUMNS,
    MAX_COUNTER,
    MAX_ENVELOPE_BYTES,
    MAX_GROUP_ENVELOPE_BYTES,
    MAX_ID_CHARACTERS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PARTIAL_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_POLICY_RANGES,
    MAX_PROMPT_BYTES,
    MAX_SAMPLES_PER_GROUP,
    MAX_SAMPLES_PER_STEP,
    MAX_STATES,
    MAX_STREAM_CONFIG_BYTES,
    MAX_TAG_CHARACTERS,
    MAX_TAGS,
    cut_text,
    require_at_most,
    require_between,
    require_bytes,
    require_id,
    require_json_array,
    require_json_object,
    require_name,
    require_some,
    shown,
    whole_number,
)
from headrace.prompts import LABEL_IS_JSON
from headrace.protobuf import Payload, RawPut, RawSample, length_delimited, parse_puts, varint
from headrace.trajectory import Failure, check_reward
from services.buffer.blocking import paced
from services.buffer.ledger.group import Group, GroupState, NewSample, Prompt, SampleRecord, payload_key
from services.buffer.ledger.indexed_stream import IndexedStream, group_digest
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.produce import GroupPut, NoLeaseReason, PutOutcome, PutResult, Release
from services.buffer.ledger.production import Production
from services.buffer.ledger.state import LedgerEvent
from services.buffer.ledger.stream import ExpiryAction, FileSource, Selection, StreamConfig, source_names
from services.buffer.store.base import Damage

_GROUP_PROMPT, _GROUP_SAMPLES = 3, 4  # of Group
_BATCH_GROUPS = 2  # of LeaseBatchResponse
_SAMPLE_TAG = b"\x0a"  # FetchSamplesResponse.samples
_ENVELOPE_TAG = b"\x0a"
_PAYLOAD_TAG = b"\x12"
_BATCH_SAMPLES_TAG = b"\x12"  # BatchGroup.samples


def sample_bytes(record: SampleRecord, payload: Payload) -> Iterable[Payload]:
    """One sample of a FetchSamplesResponse, to be joined."""
    envelope = record.envelope
    envelope_length, payload_length = varint(len(envelope)), varint(len(payload))
    length = 2 + len(envelope_length) + len(envelope) + len(payload_length) + len(payload)
    return _SAMPLE_TAG, varint(length), _ENVELOPE_TAG, envelope_length, envelope, _PAYLOAD_TAG, payload_length, payload


def group_bytes(group: pb.Group, prompt: bytes, envelopes: Iterable[bytes]) -> bytes:
    """A Group of a ListGroupsResponse whose prompt and envelopes are bytes already."""
    samples = b"".join([length_delimited(_GROUP_SAMPLES, envelope) for envelope in envelopes])
    return length_delimited(1, group.SerializeToString() + length_delimited(_GROUP_PROMPT, prompt) + samples)


def batch_group_bytes(group_id: str, envelopes: Iterable[bytes]) -> bytes:
    parts = [part for envelope in envelopes for part in (_BATCH_SAMPLES_TAG, varint(len(envelope)), envelope)]
    return length_delimited(_BATCH_GROUPS, length_delimited(1, group_id.encode()) + b"".join(parts))


def add_to_server(servicer: Any, server: Any) -> None:
    """Registers the servicer with these parsers and serializers in place of the generated ones."""
    handlers = {
        "PutGroups": grpc.unary_unary_rpc_method_handler(
            servicer.PutGroups, parse_puts, pb.PutGroupsResponse.SerializeToString
        ),
        "FetchSamples": grpc.unary_stream_rpc_method_handler(
            servicer.FetchSamples, pb.FetchSamplesRequest.FromString, bytes
        ),
        "LeaseBatch": grpc.unary_unary_rpc_method_handler(servicer.LeaseBatch, pb.LeaseBatchRequest.FromString, bytes),
        "ListGroups": grpc.unary_unary_rpc_method_handler(servicer.ListGroups, pb.ListGroupsRequest.FromString, bytes),
    }
    name = pb.DESCRIPTOR.services_by_name["BufferService"].full_name
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(name, handlers)


_DIGEST_BYTES = 32


def check_prompt(message: sample_pb2.Prompt, field: str) -> None:
    """A prompt with an id and a content, of a size that can be sent back."""
    require_id(message.prompt_id, f"{field}.prompt_id")
    require_bytes(message.ByteSize(), MAX_PROMPT_BYTES, field)
    content = message.WhichOneof("content")
    if content is None:
        raise InvalidArgument(f"prompt {message.prompt_id} has neither text nor messages", field=f"{field}.content")
    if content == "messages":
        require_some(len(message.messages.messages), f"{field}.messages")
        require_at_most(len(message.messages.messages), MAX_MESSAGES, f"{field}.messages")
        for turn in message.messages.messages:
            require_name(turn.role, f"{field}.messages.role")
            require_json_object(turn.extra_json, f"{field}.messages.extra_json")
    require_json_object(message.metadata_json, f"{field}.metadata_json")
    require_json_array(message.tools_json, f"{field}.tools_json")
    if others := sorted(require_json_object(message.hook_json, f"{field}.hook_json").keys() - {LABEL_IS_JSON}):
        raise InvalidArgument(
            f"{field}.hook_json has {shown(others)}: only the job's own data source may set them, since they name code "
            f"to run. A client may set {LABEL_IS_JSON}",
            field=f"{field}.hook_json",
        )


def check_envelope(envelope: sample_pb2.SampleEnvelope, num_bytes: int, payload_bytes: int) -> None:
    """Checks the sizes of an envelope of `num_bytes` and of its payload, and the ids in the envelope."""
    require_bytes(num_bytes, MAX_ENVELOPE_BYTES, "samples.envelope")
    require_bytes(payload_bytes, MAX_PAYLOAD_BYTES, "samples.payload")
    require_id(envelope.sample_id, "samples.envelope.sample_id")
    if rollout_id := envelope.rollout_id:
        require_id(rollout_id, "samples.envelope.rollout_id")
    require_between(envelope.index, 0, MAX_SAMPLES_PER_STEP, "samples.envelope.index")
    _require_length(envelope.scorer, MAX_ID_CHARACTERS, "samples.envelope.scorer")
    _require_length(envelope.scorer_version, MAX_ID_CHARACTERS, "samples.envelope.scorer_version")
    if envelope.HasField("failure"):
        _require_length(envelope.failure.reason, MAX_NAME_CHARACTERS, "samples.envelope.failure.reason")
    require_at_most(len(envelope.policy_ranges), MAX_POLICY_RANGES, "samples.envelope.policy_ranges")
    if tags := envelope.tags:
        _check_map(tags, "samples.envelope.tags")
        for value in tags.values():
            _require_length(value, MAX_TAG_CHARACTERS, "samples.envelope.tags")
    if parts := envelope.reward_parts:
        _check_map(parts, "samples.envelope.reward_parts")
    if columns := envelope.out_of_line:
        _check_out_of_line(columns, "samples.envelope.out_of_line")


def check_group(envelope_bytes: Sequence[int], field: str) -> None:
    """Checks how many samples a group has and how large their envelopes are together."""
    require_at_most(len(envelope_bytes), MAX_SAMPLES_PER_GROUP, field)
    require_bytes(sum(envelope_bytes), MAX_GROUP_ENVELOPE_BYTES, f"{field}.envelope")


def failure_from_proto(message: sample_pb2.Failure, field: str) -> Failure:
    """Cuts the message, which is for people."""
    _require_length(message.reason, MAX_NAME_CHARACTERS, f"{field}.reason")
    return Failure(message.reason, cut_text(message.message))


def rewards_from_proto(rewards: Sequence[float], field: str) -> tuple[float, ...]:
    """Checks each reward of a group's samples like the reward of one sample."""
    require_at_most(len(rewards), MAX_SAMPLES_PER_GROUP, field)
    for reward in rewards:
        check_reward(field, reward)
    return tuple(rewards)


def require_sha256(digest: bytes, field: str) -> bytes:
    """Raises InvalidArgument unless the digest has 32 bytes."""
    if len(digest) != _DIGEST_BYTES:
        raise InvalidArgument(f"{field} has {len(digest)} bytes, must have {_DIGEST_BYTES}", field=field)
    return digest


def _check_out_of_line(columns: Sequence[sample_pb2.OutOfLineColumn], field: str) -> None:
    require_at_most(len(columns), MAX_COLUMNS, field)
    for column in columns:
        require_name(column.name, f"{field}.name")
        require_sha256(column.sha256, f"{field}.sha256")
        require_between(column.num_bytes, 0, MAX_COLUMN_BYTES, f"{field}.num_bytes")
    if len({column.name for column in columns}) < len(columns):
        raise InvalidArgument(f"a column comes twice in {field}", field=field)


def _check_map(entries: Mapping[str, Any], field: str) -> None:
    require_at_most(len(entries), MAX_TAGS, field)
    for key in entries:
        require_name(key, field)


def _require_length(text: str, most: int, field: str) -> None:
    if len(text) > most:
        raise InvalidArgument(f"{field} has {len(text)} characters, may have {most}", field=field)


_OUTCOMES = {
    pb.PUT_OUTCOME_COMPLETE: PutOutcome.COMPLETE,
    pb.PUT_OUTCOME_DROPPED: PutOutcome.DROPPED,
    pb.PUT_OUTCOME_FAILED: PutOutcome.FAILED,
}
_STATES = {pb.GroupState.Value(f"GROUP_STATE_{state.name}"): state for state in GroupState}
_STATE_NUMBERS = {state: number for number, state in _STATES.items()}
_CONVERTED_AT_ONCE = 8
"""Samples before other work runs: their envelopes have half a MiB at most."""
_SCORED = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)
_NO_REWARD = sample_pb2.Failure(
    reason="NO_REWARD",
    message="the sample was put without a reward, and its stream trains by rewards: score samples before they are put",
)
_UNFINISHED = (sample_pb2.SAMPLE_STATUS_ABORTED, sample_pb2.SAMPLE_STATUS_PENDING)


def prompt_from_proto(message: sample_pb2.Prompt, i: int) -> Prompt:
    """Raises InvalidArgument for a prompt without an id or a content."""
    check_prompt(message, f"prompts[{i}]")
    return Prompt(message.prompt_id, message.SerializeToString(deterministic=True), message.priority)


def prompt_to_proto(prompt: Prompt) -> sample_pb2.Prompt:
    return sample_pb2.Prompt.FromString(prompt.body)


async def put_from_proto(put: RawPut, config: StreamConfig | None = None) -> GroupPut:
    """Checks everything about the put but its payloads' digests. `config` is of its stream, where it exists."""
    message, needs_reward = put.rest, config is not None and config.needs_reward
    group_id = require_id(message.group_id, "groups.group_id")
    if message.outcome not in _OUTCOMES:
        raise InvalidArgument(f"the put of {group_id} has an unknown outcome", field="groups.outcome")
    outcome = _OUTCOMES[message.outcome]
    if outcome is PutOutcome.COMPLETE:
        require_some(len(put.samples), "groups.samples")
        check_group([len(sample.envelope) for sample in put.samples], "groups.samples")
    elif not message.HasField("failure"):
        raise InvalidArgument(
            f"the put of {group_id} is {outcome.value} without a failure: say why", field="groups.failure"
        )
    samples = put.samples if outcome is PutOutcome.COMPLETE else ()
    new: list[NewSample] = []
    async for first in paced(range(0, len(samples), _CONVERTED_AT_ONCE)):
        some = enumerate(samples[first : first + _CONVERTED_AT_ONCE], first)
        keyed = [(payload_key(message.lease_id, i), sample) for i, sample in some]
        new += [to_finished(sample, group_id, key, needs_reward=needs_reward) for key, sample in keyed]
    return GroupPut(
        lease_id=require_id(message.lease_id, "groups.lease_id"),
        group_id=group_id,
        outcome=outcome,
        samples=distinct(new),
        failure=failure_from_proto(message.failure, "groups.failure") if message.HasField("failure") else None,
        rewards=rewards_from_proto(message.rewards, "groups.rewards") if outcome is PutOutcome.DROPPED else (),
    )


def to_finished(sample: RawSample, group_id: str, key: str, *, needs_reward: bool) -> NewSample:
    """Makes a sample FAILED that lacks the reward by which it would be trained; the rest of its group stays."""
    envelope = _parse_envelope(sample.envelope)
    _check_finished(envelope)
    if needs_reward and envelope.status in _SCORED and not envelope.HasField("reward"):
        envelope.status = sample_pb2.SAMPLE_STATUS_FAILED
        envelope.failure.CopyFrom(_NO_REWARD)
    # However a producer has encoded it: the same envelope is the same bytes, by which puts are compared.
    canonical = envelope.SerializeToString(deterministic=True)
    return _to_sample(RawSample(canonical, sample.payload), envelope, group_id, key)


def distinct(samples: Sequence[NewSample]) -> tuple[NewSample, ...]:
    """Raises InvalidArgument for two samples of one index, unless one execution fanned out into both."""
    rollouts: dict[int, str] = {}
    for sample in samples:
        index = sample.record.index
        if rollouts.setdefault(index, sample.rollout_id) != sample.rollout_id:
            raise InvalidArgument(
                f"sample {sample.record.sample_id} has the index {index} of another sample of its group: samples of "
                "one execution share a rollout_id, others have an index each",
                field="groups.samples.envelope.index",
            )
    return tuple(samples)


def _parse_envelope(data: bytes) -> sample_pb2.SampleEnvelope:
    try:
        return sample_pb2.SampleEnvelope.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"an envelope of {len(data)} bytes cannot be parsed: {error}",
            field="groups.samples.envelope",
            reason="MALFORMED_REQUEST",
        ) from error


async def release_from_proto(message: pb.LeaseRelease) -> Release:
    lease_id = require_id(message.lease_id, "releases.lease_id")
    samples = [RawSample(s.envelope.SerializeToString(), s.payload) async for s in paced(message.partial_samples)]
    field = "releases.partial_samples"
    check_group([len(sample.envelope) for sample in samples], field)
    require_bytes(sum(len(s.envelope) + len(s.payload) for s in samples), MAX_PARTIAL_BYTES, field)
    group_id = lease_id.rpartition("#")[0]
    pairs = enumerate(zip(samples, message.partial_samples, strict=True))
    partials = [
        _to_sample(sample, packed.envelope, group_id, payload_key(lease_id, i))
        async for i, (sample, packed) in paced(pairs)
    ]
    return Release(lease_id, tuple(partials), cut_text(message.reason))


def _to_sample(sample: RawSample, envelope: sample_pb2.SampleEnvelope, group_id: str, key: str) -> NewSample:
    check_envelope(envelope, len(sample.envelope), len(sample.payload))
    if envelope.group_id != group_id:
        raise InvalidArgument(
            f"sample {envelope.sample_id} says group {shown(envelope.group_id)} and comes with group {group_id!r}",
            field="samples.envelope.group_id",
        )
    is_failed = _is_failed(envelope)
    oldest, newest = _versions(envelope)
    columns = envelope.out_of_line
    return NewSample(
        SampleRecord(
            key=key,
            sample_id=envelope.sample_id,
            index=envelope.index,
            digest=envelope.digest,
            payload_bytes=envelope.payload_bytes,
            oldest_version=oldest,
            envelope=sample.envelope,
            reward=envelope.reward if envelope.HasField("reward") and not is_failed else None,
            column_bytes=sum([column.num_bytes for column in columns]) if columns else 0,
        ),
        sample.payload,
        tuple([column.sha256 for column in columns]) if columns else (),
        newest,
        envelope.rollout_id or envelope.sample_id,
        failure_from_proto(envelope.failure, "samples.envelope.failure") if is_failed else None,
    )


def _check_finished(envelope: sample_pb2.SampleEnvelope) -> None:
    if envelope.status in _UNFINISHED:
        raise InvalidArgument(
            f"sample {envelope.sample_id} is not finished, and its group is put as COMPLETE: release the lease with "
            "partial_samples, or put the group as FAILED",
            field="groups.samples.envelope.status",
        )


def _versions(envelope: sample_pb2.SampleEnvelope) -> tuple[int | None, int | None]:
    """Returns (oldest version of the trained tokens, newest version of all tokens)."""
    oldest: int | None = None
    newest: int | None = None
    for one in envelope.policy_ranges:
        version = one.policy_version
        if newest is None or version > newest:
            newest = version
        if (oldest is None or version < oldest) and one.end > one.start and not one.masked:
            oldest = version
    return oldest, newest


def _is_failed(envelope: sample_pb2.SampleEnvelope) -> bool:
    """True for a sample with a failure. Raises InvalidArgument unless its status says the same."""
    if envelope.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        raise InvalidArgument(f"sample {envelope.sample_id} has no status", field="samples.envelope.status")
    is_failed = envelope.status == sample_pb2.SAMPLE_STATUS_FAILED
    if is_failed != envelope.HasField("failure"):
        raise InvalidArgument(
            f"sample {envelope.sample_id} must have a failure exactly when its status is FAILED",
            field="samples.envelope.failure",
        )
    return is_failed


def put_result_to_proto(result: PutResult) -> pb.PutResult:
    return pb.PutResult(
        group_id=result.group_id,
        state=pb.GROUP_STATE_UNSPECIFIED if result.state is None else state_to_proto(result.state),
        duplicate=result.duplicate,
        refused=_failure_to_proto(result.refused),
    )


def sample_to_proto(record: SampleRecord, payload: Payload) -> sample_pb2.Sample:
    """Returns the sample as it was put."""
    return sample_pb2.Sample(envelope=record_to_proto(record), payload=bytes(payload))


def record_to_proto(record: SampleRecord) -> sample_pb2.SampleEnvelope:
    """Returns the envelope as it was put."""
    return sample_pb2.SampleEnvelope.FromString(record.envelope)


def lease_to_proto(
    group: Group, seconds_left: float, n_samples: int, partials: Sequence[sample_pb2.Sample]
) -> pb.GroupLease:
    lease = group.live_lease
    return pb.GroupLease(
        lease_id=lease.lease_id,
        group_id=group.group_id,
        prompt=prompt_to_proto(group.prompt),
        n_samples=n_samples,
        attempt=group.attempts,
        lease_seconds=seconds_left,
        policy_version=lease.policy_version,
        partial_samples=partials,
    )


def leases_to_proto(
    leases: Sequence[pb.GroupLease], reason: NoLeaseReason | None, oldest_version: int
) -> pb.LeaseGroupsResponse:
    name = f"NO_LEASE_REASON_{reason.name if reason else 'UNSPECIFIED'}"
    return pb.LeaseGroupsResponse(
        leases=leases, no_lease_reason=pb.NoLeaseReason.Value(name), oldest_version=oldest_version
    )


def group_to_proto(group: Group) -> bytes:
    """Returns the group, serialized, as ListGroups answers it."""
    message = pb.Group(
        group_id=group.group_id,
        state=state_to_proto(group.state),
        attempts=group.attempts,
        step=group.step,
        failure=_failure_to_proto(group.failure),
        position=group.position,
        digest=group_digest(group) if group.samples else b"",
        batch_index=group.batch_index,
    )
    return group_bytes(message, group.prompt.body, (record.envelope for record in group.samples))


def event_to_proto(event: LedgerEvent) -> pb.LedgerEvent:
    message = pb.LedgerEvent(
        position=event.position,
        stream=event.stream,
        group_id=event.group_id or "",
        kind=event.kind,
        state=state_to_proto(event.state) if event.state else pb.GROUP_STATE_UNSPECIFIED,
        epoch=event.epoch or 0,
        step=event.step,
        policy_version=event.policy_version,
        sample_ids=event.sample_ids,
        detail=event.detail,
    )
    message.time.FromNanoseconds(int(event.unix_seconds * 1e9))
    return message


def damage_to_proto(damage: Damage) -> pb.Damage:
    return pb.Damage(what=damage.what, group_id=damage.group_id, sample_id=damage.sample_id)


def state_to_proto(state: GroupState) -> pb.GroupState.ValueType:
    return _STATE_NUMBERS[state]


def states_from_proto(numbers: Sequence[pb.GroupState.ValueType]) -> list[GroupState]:
    """Raises InvalidArgument for an unknown state."""
    require_at_most(len(numbers), MAX_STATES, "states")
    unknown = [n for n in numbers if n not in _STATES]
    if unknown:
        raise InvalidArgument(f"states {unknown} are unknown", field="states")
    return [_STATES[n] for n in numbers]


def page_token_from_proto(token: str) -> int | None:
    """Returns a position, or None for the first page."""
    if not token:
        return None
    if (position := whole_number(token, MAX_COUNTER)) is None:
        raise InvalidArgument(f"page_token {shown(token)} was not returned by ListGroups", field="page_token")
    return position


def _failure_to_proto(failure: Failure | None) -> sample_pb2.Failure | None:
    return sample_pb2.Failure(reason=failure.reason, message=failure.message) if failure else None


# A stream's configuration and counts.


_LIMITER_NAMES = {"min_size_to_sample": "min_size"}
_ENUMS: dict[str, dict[int, Selection | ExpiryAction]] = {
    "selection": {pb.Selection.Value(f"SELECTION_{one.name}"): one for one in Selection},
    "expiry_action": {pb.ExpiryAction.Value(f"EXPIRY_ACTION_{one.name}"): one for one in ExpiryAction},
}


def config_from_proto(message: pb.StreamConfig) -> StreamConfig:
    """What is not set has StreamConfig's default; `check_config` checks the bounds."""
    require_bytes(message.ByteSize(), MAX_STREAM_CONFIG_BYTES, "config")
    if message.selection == pb.SELECTION_HOOK or message.data_source:
        raise InvalidArgument(
            "selection HOOK and data_source run code on the buffer's machine: only its job may name them "
            "(--buffer-filter-path, --data-source-path)",
            field="config.data_source" if message.data_source else "config.selection",
        )
    values = {"name": "", "n_samples_per_prompt": 0, "groups_per_step": 0, **_set_fields(message)}
    values["files"] = tuple(FileSource(**{"path": "", "input_key": "", **_set_fields(file)}) for file in message.files)
    if message.HasField("limiter"):
        limiter = _set_fields(message.limiter)
        values["limiter"] = Limiter(**{_LIMITER_NAMES.get(name, name): value for name, value in limiter.items()})
    for name, known in _ENUMS.items():
        if number := getattr(message, name):
            if number not in known:
                raise InvalidArgument(f"{name} {number} is unknown", field=f"config.{name}")
            values[name] = known[number]
    return StreamConfig(**values)


def _set_fields(message: Message) -> dict[str, Any]:
    """The fields that are set, by name: the ledger's types have the same names, and their own defaults."""
    return {field.name: value for field, value in message.ListFields()}


def config_to_proto(config: StreamConfig) -> pb.StreamConfig:
    values = {name: getattr(config, name) for name in StreamConfig.__slots__}  # None: not set
    return pb.StreamConfig(
        **values
        | {
            "expiry_action": pb.ExpiryAction.Value(f"EXPIRY_ACTION_{config.expiry_action.name}"),
            "selection": pb.Selection.Value(f"SELECTION_{config.selection.name}"),
            "files": [
                pb.FileSource(**{name: getattr(file, name) for name in FileSource.__slots__}) for file in config.files
            ],
            "limiter": _limiter_to_proto(config.limiter) if config.limiter else None,
        }
    )


def _limiter_to_proto(limiter: Limiter) -> pb.RateLimiter:
    return pb.RateLimiter(
        min_size_to_sample=limiter.min_size,
        samples_per_insert=limiter.samples_per_insert,
        error_buffer=limiter.error_buffer,
    )


def stats_to_proto(stream: IndexedStream) -> pb.StreamStats:
    """Returns all but `trouble`, which the prompt files know."""
    state = stream.state
    return pb.StreamStats(
        stream=state.name,
        groups={group_state.name: stream.count(group_state) for group_state in GroupState},
        payload_bytes=stream.payload_bytes,
        stored_bytes=stream.stored_bytes,
        epoch=state.epoch,
        step=state.step,
        committed_step=state.committed_step,
        policy_version=state.policy_version,
        admissible_groups=stream.slots_left(),
        prompts_read=state.prompts_read,
        data_epoch=state.data_epoch,
        bad_lines=state.num_bad_lines,
        forgotten_step=state.forgotten_step,
        sources=_sources(stream) if len(state.config.files) > 1 else (),
        production=_production_to_proto(stream.production),
    )


def _sources(stream: IndexedStream) -> list[pb.SourceStats]:
    state, found = stream.state, []
    names = source_names(state.config.files)
    for i, (name, file, cursor) in enumerate(zip(names, state.config.files, state.cursors, strict=True)):
        queued, leased, ready = stream.queues.counts(i)
        found.append(
            pb.SourceStats(
                name=name,
                weight=file.weight,
                prompts_read=cursor.prompts_read,
                data_epoch=cursor.epoch,
                ended=state.has_ended(i),
                queued=queued,
                leased=leased,
                ready=ready,
                batched=state.taken_of(i),
            )
        )
    return found


def _production_to_proto(production: Production) -> pb.Production:
    return pb.Production(
        num_samples=production.num_samples,
        num_failed=production.num_failed,
        num_dropped=production.num_dropped,
        num_scored=production.num_scored,
        reward_sum=production.reward_sum,
        failures=[
            pb.FailureCount(
                reason=reason, num_samples=count.num_samples, example=count.example, group_id=count.group_id
            )
            for reason, count in production.failures.items()
        ],
        num_groups_returned=production.num_groups_returned,
        last_return=production.last_return,
        filtered=[
            pb.FilteredCount(reason=reason, equal_reward=reward, num_samples=number)
            for reason, reward, number in production.filtered
        ],
        lowest_reward=production.lowest_reward,
        highest_reward=production.highest_reward,
    )
