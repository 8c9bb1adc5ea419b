"""The `train` stream, the store and the user's code of a job. Beside `__main__`, only this module reads a whole job."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.job.schema.production import DataSection
from headrace.job.schema.section import PromptPath
from headrace.job.schema.services import BufferSection
from headrace.limits import share_of_count, share_of_least, share_of_limit
from headrace.models.registry import read_architecture
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.stream import (
    DEFAULT_MAX_GROUPS,
    DEFAULT_MAX_LEASES,
    FileSource,
    Selection,
    StreamConfig,
    check_config,
)
from services.buffer.runtime.user_code import UserCode
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import FILE, SqliteStore

TRAIN_STREAM = "train"
LEASE_SECONDS = 60.0
"""A producer that is silent for longer loses its groups."""
MAX_ATTEMPTS = 3
"""Leases of a group before it is FAILED."""
RETAIN_STEPS = 100
"""Committed and dropped groups are deleted this number of steps after their own."""
HOOK_SECONDS = 60.0
"""Limit of one call of buffer_filter_path or data_source_path."""


def train_stream(job: Job) -> StreamConfig:
    """Raises ConfigError when staleness would refuse every group, or the job's sizes are not resolved."""
    interval = job.publish.update_weights_interval
    if job.buffer.max_staleness < interval - 1:
        raise ConfigError(
            f"update_weights_interval {interval} serves weights up to {interval - 1} steps old, "
            f"max_staleness is {job.buffer.max_staleness}: set it to {interval - 1} or more, or publish more often"
        )
    shard, num_shards = _shard(job)
    config = StreamConfig(
        name=TRAIN_STREAM,
        n_samples_per_prompt=job.rollout.samples_per_group,
        groups_per_step=share_of_count(job.rollout.groups_per_step, shard, num_shards),
        max_staleness=job.buffer.max_staleness,
        lease_seconds=LEASE_SECONDS,
        max_attempts=MAX_ATTEMPTS,
        selection=_selection(job.buffer),
        files=() if job.data.data_source_path else _files(job.data),
        data_source=job.data.data_source_path,
        max_payload_bytes=share_of_limit(job.buffer.max_payload_bytes, num_shards),
        max_groups=share_of_limit(DEFAULT_MAX_GROUPS, num_shards),
        max_leases=share_of_limit(DEFAULT_MAX_LEASES, num_shards),
        retain_steps=RETAIN_STEPS,
        over_sampling_groups=share_of_count(
            _surplus(job.rollout.over_sampling_batch_size, job.rollout.groups_per_step), shard, num_shards
        ),
        limiter=_limiter(job, shard, num_shards),
        shard=shard,
        num_shards=num_shards,
        vocab_size=_vocab_size(job.model.hf_checkpoint),
        needs_reward=job.needs_reward,
    )
    check_config(config)
    return config


def of_shard(job: Job, shard: int) -> Job:
    return job.model_copy(update={"buffer": job.buffer.model_copy(update={"buffer_shard": shard})})


def store_of_job(job: Job, folder: Path) -> Store:
    """Names the ledger in a database after the run and the shard's number."""
    shard = job.buffer.buffer_shard
    return open_store(job.buffer, folder, job.run.run_name + ("" if shard is None else f"/{shard}"))


def user_code_of(job: Job, links: Path) -> UserCode:
    """The Python that the job names for the buffer; `links` is the ledger's folder."""
    return UserCode(hook_args(job), job.buffer.buffer_filter_path, HOOK_SECONDS, links)


def _vocab_size(checkpoint: Path) -> int | None:
    """Returns None where the buffer's machine has no checkpoint; the trainer alone then checks token ids."""
    return read_architecture(checkpoint).vocab_size if (checkpoint / "config.json").is_file() else None


def _shard(job: Job) -> tuple[int, int]:
    """Returns (number of this shard, number of shards)."""
    if job.num_shards == 1:
        return 0, 1
    if job.buffer.buffer_shard is None:
        raise ConfigError(f"this buffer is one of {job.num_shards} shards and was not told which: pass --buffer-shard")
    return job.buffer.buffer_shard, job.num_shards


def _surplus(over_sampling_batch_size: int | None, groups_per_step: int) -> int:
    return 0 if over_sampling_batch_size is None else over_sampling_batch_size - groups_per_step


def _selection(buffer: BufferSection) -> Selection:
    return Selection.HOOK if buffer.buffer_filter_path else Selection(buffer.selection.upper())


def _limiter(job: Job, shard: int, num_shards: int) -> Limiter | None:
    """Either side may be a step's batch ahead: with less than half of it and one insert, each waits for the other."""
    target = job.buffer.samples_per_insert
    if job.buffer.min_size_to_sample is None:
        return None
    min_size = share_of_least(job.buffer.min_size_to_sample, shard, num_shards)
    return Limiter(min_size, target, None if target is None else float(job.rollout.groups_per_step))


def _files(data: DataSection) -> tuple[FileSource, ...]:
    weights = data.prompt_data_weights or (1.0,) * len(data.prompt_data)
    return tuple(_file(data, text, weight) for text, weight in zip(data.prompt_data, weights, strict=True))


def _file(data: DataSection, text: str, weight: float) -> FileSource:
    part = PromptPath.parse(text)
    return FileSource(
        path=str(part.path),
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        priority_key=data.priority_key,
        image_key=data.image_key,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        num_epochs=data.num_epoch,
        skip_bad_lines=data.skip_bad_lines,
        first_row=part.first_row,
        end_row=part.end_row,
        weight=weight,
        streaming=data.streaming_data,
        num_workers=data.num_data_workers,
    )


DATABASE_WAIT_SECONDS = 120.0
"""A database that is unreachable for longer (a failover) ends the buffer; until then it waits."""


def open_store(section: BufferSection, folder: Path, name: str) -> Store:
    """Raises ConfigError when the folder holds a ledger of another kind, which would be ignored otherwise."""
    if (folder / "segments").exists():
        raise ConfigError(
            f"{folder} holds a ledger of buffer_store segments, which this headrace does not read: finish the run with "
            "the headrace that wrote it, or choose another run_name, which begins a ledger of buffer_store sqlite"
        )
    if section.buffer_store != "sqlite" and (folder / FILE).exists():
        raise ConfigError(
            f"{folder} holds a ledger of buffer_store sqlite, the job says {section.buffer_store}: "
            "set buffer_store to sqlite, or choose another run_name"
        )
    match section.buffer_store:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SqliteStore(folder)
        case "postgres":
            if section.buffer_postgres is None:
                raise ConfigError("buffer_store postgres needs a database: pass --buffer-postgres postgresql://…")
            from services.buffer.store.postgres import PostgresStore  # its driver is an extra: headrace[postgres]

            return PostgresStore(section.buffer_postgres, name, wait_seconds=DATABASE_WAIT_SECONDS)
