"""A stream's configuration and counts: protos to the ledger's types and back."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.limits import MAX_STREAM_CONFIG_BYTES, require_bytes
from services.buffer.ledger.group import GroupState
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.production import Production
from services.buffer.ledger.source import FileSource, source_names
from services.buffer.ledger.stream import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_GROUPS,
    DEFAULT_MAX_LEASES,
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_MAX_QUEUED_GROUPS,
    ExpiryAction,
    Selection,
    StreamConfig,
)

_SELECTIONS = {
    pb.SELECTION_UNSPECIFIED: Selection.FIFO,
    pb.SELECTION_FIFO: Selection.FIFO,
    pb.SELECTION_LIFO: Selection.LIFO,
    pb.SELECTION_PRIORITY: Selection.PRIORITY,
    pb.SELECTION_FRESHEST: Selection.FRESHEST,
    pb.SELECTION_REWARD: Selection.REWARD,
    pb.SELECTION_SURPRISE: Selection.SURPRISE,
}
_EXPIRY_ACTIONS = {
    pb.EXPIRY_ACTION_UNSPECIFIED: ExpiryAction.REQUEUE,
    pb.EXPIRY_ACTION_REQUEUE: ExpiryAction.REQUEUE,
    pb.EXPIRY_ACTION_DROP: ExpiryAction.DROP,
}


def config_from_proto(message: pb.StreamConfig) -> StreamConfig:
    """Fills in defaults; `stream_limits` checks the bounds."""
    require_bytes(message.ByteSize(), MAX_STREAM_CONFIG_BYTES, "config")
    if message.selection == pb.SELECTION_HOOK or message.data_source:
        raise InvalidArgument(
            "selection HOOK and data_source run code on the buffer's machine: only its job may name them "
            "(--buffer-filter-path, --data-source-path)",
            field="config.data_source" if message.data_source else "config.selection",
        )
    if message.selection not in _SELECTIONS:
        raise InvalidArgument(f"selection {message.selection} is unknown", field="config.selection")
    if message.expiry_action not in _EXPIRY_ACTIONS:
        raise InvalidArgument(f"expiry_action {message.expiry_action} is unknown", field="config.expiry_action")
    return StreamConfig(
        name=message.name,
        n_samples_per_prompt=message.n_samples_per_prompt,
        groups_per_step=message.groups_per_step,
        max_staleness=message.max_staleness if message.HasField("max_staleness") else None,
        lease_seconds=message.lease_seconds or DEFAULT_LEASE_SECONDS,
        max_attempts=message.max_attempts or DEFAULT_MAX_ATTEMPTS,
        expiry_action=_EXPIRY_ACTIONS[message.expiry_action],
        selection=_SELECTIONS[message.selection],
        files=tuple(_to_file(file) for file in message.files),
        max_payload_bytes=message.max_payload_bytes or DEFAULT_MAX_PAYLOAD_BYTES,
        max_queued_groups=message.max_queued_groups or DEFAULT_MAX_QUEUED_GROUPS,
        max_groups=message.max_groups or DEFAULT_MAX_GROUPS,
        max_leases=message.max_leases or DEFAULT_MAX_LEASES,
        retain_steps=message.retain_steps if message.HasField("retain_steps") else None,
        over_sampling_groups=message.over_sampling_groups,
        limiter=_to_limiter(message.limiter) if message.HasField("limiter") else None,
        shard=message.shard,
        num_shards=message.num_shards or 1,
        vocab_size=message.vocab_size if message.HasField("vocab_size") else None,
        needs_reward=message.needs_reward,
    )


def _to_file(message: pb.FileSource) -> FileSource:
    return FileSource(
        path=message.path,
        input_key=message.input_key,
        label_key=message.label_key or None,
        metadata_key=message.metadata_key or None,
        tool_key=message.tool_key or None,
        shuffle=message.shuffle,
        seed=message.seed,
        num_epochs=message.num_epochs or None,
        skip_bad_lines=message.skip_bad_lines,
        priority_key=message.priority_key or None,
        image_key=message.image_key or None,
        first_row=message.first_row,
        end_row=message.end_row if message.HasField("end_row") else None,
        weight=message.weight or 1.0,
        streaming=message.streaming,
        num_workers=message.num_workers or 1,
    )


def _to_limiter(message: pb.RateLimiter) -> Limiter:
    return Limiter(
        min_size=message.min_size_to_sample or 1,
        samples_per_insert=message.samples_per_insert if message.HasField("samples_per_insert") else None,
        error_buffer=message.error_buffer if message.HasField("error_buffer") else None,
    )


def config_to_proto(config: StreamConfig) -> pb.StreamConfig:
    return pb.StreamConfig(
        name=config.name,
        n_samples_per_prompt=config.n_samples_per_prompt,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        lease_seconds=config.lease_seconds,
        max_attempts=config.max_attempts,
        expiry_action=pb.ExpiryAction.Value(f"EXPIRY_ACTION_{config.expiry_action.name}"),
        selection=pb.Selection.Value(f"SELECTION_{config.selection.name}"),
        files=[_from_file(file) for file in config.files],
        data_source=config.data_source or "",
        shard=config.shard,
        num_shards=config.num_shards,
        max_payload_bytes=config.max_payload_bytes,
        max_queued_groups=config.max_queued_groups,
        max_groups=config.max_groups,
        max_leases=config.max_leases,
        retain_steps=config.retain_steps,
        over_sampling_groups=config.over_sampling_groups,
        limiter=_from_limiter(config.limiter) if config.limiter else None,
        vocab_size=config.vocab_size,
        needs_reward=config.needs_reward,
    )


def _from_limiter(limiter: Limiter) -> pb.RateLimiter:
    return pb.RateLimiter(
        min_size_to_sample=limiter.min_size,
        samples_per_insert=limiter.samples_per_insert,
        error_buffer=limiter.error_buffer,
    )


def _from_file(file: FileSource) -> pb.FileSource:
    return pb.FileSource(
        path=file.path,
        input_key=file.input_key,
        label_key=file.label_key or "",
        metadata_key=file.metadata_key or "",
        tool_key=file.tool_key or "",
        shuffle=file.shuffle,
        seed=file.seed,
        num_epochs=file.num_epochs or 0,
        skip_bad_lines=file.skip_bad_lines,
        priority_key=file.priority_key or "",
        image_key=file.image_key or "",
        first_row=file.first_row,
        end_row=file.end_row,
        weight=file.weight,
        streaming=file.streaming,
        num_workers=file.num_workers,
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
        admissible_groups=stream.places_left(),
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
