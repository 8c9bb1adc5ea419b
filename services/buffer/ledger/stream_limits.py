"""Bounds for a stream's config: what is stored can be sent back, and no step is too long."""

from __future__ import annotations

from headrace.errors import InvalidArgument
from headrace.limits import (
    MAX_ATTEMPTS,
    MAX_COUNTER,
    MAX_FILE_WEIGHT,
    MAX_FILE_WORKERS,
    MAX_FILES,
    MAX_GROUPS,
    MAX_GROUPS_PER_STEP,
    MAX_LEASE_SECONDS,
    MAX_SAMPLES_PER_GROUP,
    MAX_SAMPLES_PER_STEP,
    MAX_SHARDS,
    MAX_STALENESS,
    optional_name,
    require_at_most,
    require_between,
    require_finite,
    require_name,
    require_path,
)
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.source import FileSource
from services.buffer.ledger.stream import StreamConfig

_LEAST_LEASE_SECONDS = 1e-3
_LARGEST_SEED = (1 << 63) - 1


def check_limits(config: StreamConfig) -> None:
    """Raises InvalidArgument naming the field. Every new config is checked, the job's own too."""
    if any(part in ("", ".", "..") for part in config.name.split("/")):
        raise InvalidArgument(f"stream name {config.name!r} has an empty part, or . or ..", field="config.name")
    _between(config.n_samples_per_prompt, 1, MAX_SAMPLES_PER_GROUP, "n_samples_per_prompt")
    _between(config.groups_per_step, 1, MAX_GROUPS_PER_STEP, "groups_per_step")
    num_samples = config.groups_per_step * config.n_samples_per_prompt
    if num_samples > MAX_SAMPLES_PER_STEP:
        raise InvalidArgument(
            f"groups_per_step {config.groups_per_step} x n_samples_per_prompt {config.n_samples_per_prompt} is "
            f"{num_samples}, a step may have {MAX_SAMPLES_PER_STEP} samples: use several shards",
            field="config.groups_per_step",
        )
    _between(config.max_staleness or 0, 0, MAX_STALENESS, "max_staleness")
    require_finite(config.lease_seconds, "config.lease_seconds", least=_LEAST_LEASE_SECONDS, most=MAX_LEASE_SECONDS)
    _between(config.max_attempts, 1, MAX_ATTEMPTS, "max_attempts")
    _between(config.max_payload_bytes, 1, MAX_COUNTER, "max_payload_bytes")
    for name in ("max_queued_groups", "max_groups", "max_leases"):
        value: int = getattr(config, name)
        _between(value, 1, MAX_GROUPS, name)
    _between(config.retain_steps or 0, 0, MAX_STALENESS, "retain_steps")
    _between(config.over_sampling_groups, 0, MAX_GROUPS_PER_STEP, "over_sampling_groups")
    _between(config.num_shards, 1, MAX_SHARDS, "num_shards")
    if config.limiter:
        _check_limiter(config.limiter)
    require_at_most(len(config.files), MAX_FILES, "config.files")
    for file in config.files:
        _check_file(file)


def _check_limiter(limiter: Limiter) -> None:
    _between(limiter.min_size, 1, MAX_GROUPS, "limiter.min_size_to_sample")
    for name, value in (("samples_per_insert", limiter.samples_per_insert), ("error_buffer", limiter.error_buffer)):
        if value is not None:
            require_finite(value, f"config.limiter.{name}", least=1 / MAX_GROUPS, most=MAX_GROUPS)


def _check_file(file: FileSource) -> None:
    require_path(file.path, "config.files.path")
    require_name(file.input_key, "config.files.input_key")
    for name in ("label_key", "metadata_key", "tool_key", "priority_key", "image_key"):
        key: str | None = getattr(file, name)
        optional_name(key or "", f"config.files.{name}")
    _between(file.seed, -_LARGEST_SEED - 1, _LARGEST_SEED, "files.seed")
    _between(file.num_epochs or 0, 0, MAX_GROUPS, "files.num_epochs")
    _between(file.first_row, 0, MAX_COUNTER, "files.first_row")
    _between(file.end_row or 0, 0, MAX_COUNTER, "files.end_row")
    require_finite(file.weight, "config.files.weight", least=1 / MAX_FILE_WEIGHT, most=MAX_FILE_WEIGHT)
    _between(file.num_workers, 1, MAX_FILE_WORKERS, "files.num_workers")


def _between(value: int, least: int, most: int, name: str) -> None:
    require_between(value, least, most, f"config.{name}")
