"""A stream's configuration and counts: protos to the ledger's types and back."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.limits import MAX_STREAM_CONFIG_BYTES, require_bytes
from services.buffer.ledger.group import GroupState
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.production import Production
from services.buffer.ledger.stream import ExpiryAction, FileSource, Selection, StreamConfig, source_names

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
