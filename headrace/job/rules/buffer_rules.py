"""Rules of the buffer's options: the source of groups, their staleness, and the choice of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import ConfigError
from headrace.job.schema.job import Job


def check_buffer(job: Job) -> None:
    """Raises ConfigError for the first rule that a job breaks."""
    for rule in _RULES:
        rule(job)


def _postgres_has_a_database(job: Job) -> None:
    if job.buffer.buffer_store == "postgres" and job.buffer.buffer_postgres is None:
        raise ConfigError(
            "buffer_store postgres needs a database: pass --buffer-postgres postgresql://USER@HOST/NAME",
            field="buffer_postgres",
        )


def _shards_have_addresses(job: Job) -> None:
    """The addresses of shards that are started elsewhere, or by hand."""
    buffer, num_shards = job.buffer, len(job.buffer.buffer_addresses)
    if not num_shards:
        return
    if len(set(buffer.buffer_addresses)) < num_shards:
        raise ConfigError(
            f"buffer_addresses {list(buffer.buffer_addresses)} has an address twice: give each shard its own",
            field="buffer_addresses",
        )
    if job.services.buffer_address not in (None, ",".join(buffer.buffer_addresses)):
        raise ConfigError(
            f"buffer_address {job.services.buffer_address} and buffer_addresses are both given: leave one of them out",
            field="buffer_addresses",
        )
    if buffer.buffer_shard is not None and buffer.buffer_shard >= num_shards:
        raise ConfigError(
            f"buffer_shard {buffer.buffer_shard} is not an index of the {num_shards} buffer_addresses, which are "
            f"counted from 0",
            field="buffer_shard",
        )


def _shards_add_up(job: Job) -> None:
    """`buffer_shards` is the number of shards wherever an address says how many there are."""
    buffer, address = job.buffer, job.services.buffer_address
    named = {
        "buffer_addresses": len(buffer.buffer_addresses),
        "buffer_address": len(address.split(",")) if address else 0,
    }
    for name, count in named.items():
        if count not in (0, buffer.buffer_shards) and buffer.buffer_shards > 1:
            raise ConfigError(
                f"buffer_shards {buffer.buffer_shards} contradicts {name}, which names {count} buffer"
                f"{'s' if count > 1 else ''}: leave --buffer-shards out where buffers are started elsewhere, or leave "
                f"the address out to have them started here",
                field="buffer_shards",
            )
    if (job.rollout.rollout_batch_size or buffer.num_shards) < buffer.num_shards:
        raise ConfigError(
            f"rollout_batch_size {job.rollout.rollout_batch_size} is less than the {buffer.num_shards} shards: "
            "every shard needs a group in every step",
            field="buffer_addresses" if buffer.buffer_addresses else "buffer_shards",
        )


def _interval_within_staleness(job: Job) -> None:
    behind = job.publish.update_weights_interval - 1
    if behind > job.buffer.max_staleness:
        raise ConfigError(
            f"update_weights_interval {behind + 1} makes tokens up to {behind} steps old, and max_staleness is "
            f"{job.buffer.max_staleness}: pass --max-staleness {behind} or a shorter interval",
            field="update_weights_interval",
        )


def _mixed_prompts(job: Job) -> None:
    files, weights = job.data.prompt_data, job.data.prompt_data_weights
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"prompt_data_weights has {len(weights)} numbers for {len(files)} files of prompt_data: give one for each",
            field="prompt_data_weights",
        )


def _hooks_of_the_buffer(job: Job) -> None:
    if job.data.data_source_path:
        for flag, value in (
            ("prompt_data_weights", job.data.prompt_data_weights),
            ("streaming_data", job.data.streaming_data),
        ):
            if value:
                raise ConfigError(
                    f"{flag} is for prompt_data that the buffer reads; data_source_path {job.data.data_source_path} "
                    "draws from its dataset itself: leave one out",
                    field=flag,
                )
    if job.buffer.buffer_filter_path and job.buffer.selection != "fifo":
        raise ConfigError(
            f"buffer_filter_path chooses the batches, selection {job.buffer.selection} has no effect: leave one out",
            field="selection",
        )


def _limiter(job: Job) -> None:
    buffer, groups = job.buffer, job.rollout.rollout_batch_size
    if buffer.samples_per_insert is None or groups is None:
        return
    least = (groups + buffer.samples_per_insert) / 2
    if buffer.samples_per_insert_error_buffer is None or buffer.samples_per_insert_error_buffer < least:
        raise ConfigError(
            f"samples_per_insert needs a samples_per_insert_error_buffer of {least:g} or more, half of "
            f"rollout_batch_size {groups} plus one insert, not {buffer.samples_per_insert_error_buffer}: with less, "
            "producers and trainer wait for each other",
            field="samples_per_insert_error_buffer",
        )


def _over_sampling(job: Job) -> None:
    asked, needed = job.rollout.over_sampling_batch_size, job.rollout.rollout_batch_size
    if asked is not None and needed is not None and asked < needed:
        raise ConfigError(
            f"over_sampling_batch_size {asked} is below rollout_batch_size {needed}: a step would never fill; "
            f"pass {needed} or more, or leave it out",
            field="over_sampling_batch_size",
        )


def _partial_rollout(job: Job) -> None:
    if not job.rollout.partial_rollout or job.rollout.mask_offpolicy_in_partial_rollout or job.buffer.max_staleness:
        return
    raise ConfigError(
        "partial_rollout with max_staleness 0 keeps tokens of older policies that could never be trained: pass "
        "--mask-offpolicy-in-partial-rollout, or --max-staleness 1 or more",
        field="partial_rollout",
    )


_RULES: Sequence[Callable[[Job], None]] = (
    _postgres_has_a_database,
    _shards_have_addresses,
    _shards_add_up,
    _interval_within_staleness,
    _mixed_prompts,
    _hooks_of_the_buffer,
    _limiter,
    _over_sampling,
    _partial_rollout,
)
