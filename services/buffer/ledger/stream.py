"""A stream: a prompt source plus an admission rule. The config is fixed at creation, the state moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

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
    shown,
)
from services.buffer.ledger.limiter import Limiter

DEFAULT_LEASE_SECONDS = 60.0
DEFAULT_MAX_ATTEMPTS = 3
DEFAULT_MAX_PAYLOAD_BYTES = 8 << 30
DEFAULT_MAX_QUEUED_GROUPS = 1_000_000
DEFAULT_MAX_GROUPS = 2_000_000
DEFAULT_MAX_LEASES = 100_000

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_LARGEST_SEED = (1 << 63) - 1
_LEAST_LEASE_SECONDS = 1e-3
_LIMITS = (
    "max_staleness",
    "lease_seconds",
    "max_attempts",
    "expiry_action",
    "max_payload_bytes",
    "max_queued_groups",
    "max_groups",
    "max_leases",
    "retain_steps",
    "over_sampling_groups",
    "limiter",
    "vocab_size",
    "needs_reward",
)


class ExpiryAction(StrEnum):
    """The rule for READY groups that have become too stale."""

    REQUEUE = "REQUEUE"
    DROP = "DROP"


class Selection(StrEnum):
    """The order in which READY groups become a batch; with HOOK the user's buffer_filter chooses."""

    FIFO = "FIFO"
    LIFO = "LIFO"
    PRIORITY = "PRIORITY"
    FRESHEST = "FRESHEST"
    REWARD = "REWARD"
    SURPRISE = "SURPRISE"
    HOOK = "HOOK"


@dataclass(frozen=True, slots=True)
class FileSource:
    """Rows [first_row, end_row) of a JSONL or Parquet file."""

    path: str
    input_key: str
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    priority_key: str | None = None
    image_key: str | None = None
    shuffle: bool = False
    seed: int = 0
    num_epochs: int | None = None
    skip_bad_lines: bool = False
    first_row: int = 0
    end_row: int | None = None
    weight: float = 1.0
    """Its share of the stream's prompts, relative to the weights of the other files."""
    streaming: bool = False
    """Only the blocks being read are in memory."""
    num_workers: int = 1
    """Processes that parse blocks of a streamed file."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position in one file: every prompt before (epoch, row) is a group already.

    In a streamed file `row` counts from the start of the block at byte (or row group) `offset`, which has `line` rows
    before it.
    """

    epoch: int = 0
    row: int = 0
    prompts_read: int = 0
    offset: int = 0
    line: int = 0
    bad_lines: int = 0
    """Bad lines skipped so far in a streamed file."""


def source_names(files: Sequence[FileSource]) -> list[str]:
    """Names each source in prompt ids and statistics by its file's name, numbered where two files share it."""
    names = [Path(file.path).name for file in files]
    times = Counter(names)
    return [name if times[name] == 1 else f"{i}.{name}" for i, name in enumerate(names)]


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """`check_config` says which values are allowed."""

    name: str
    n_samples_per_prompt: int
    groups_per_step: int
    max_staleness: int | None = None
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    expiry_action: ExpiryAction = ExpiryAction.REQUEUE
    selection: Selection = Selection.FIFO
    files: tuple[FileSource, ...] = ()
    data_source: str | None = None
    """Path of the user's data source class; then there are no files."""
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    max_queued_groups: int = DEFAULT_MAX_QUEUED_GROUPS
    max_groups: int = DEFAULT_MAX_GROUPS
    """QUEUED, LEASED, READY and CONSUMED groups together."""
    max_leases: int = DEFAULT_MAX_LEASES
    retain_steps: int | None = None
    """COMMITTED and DROPPED groups are deleted this many steps after their own was committed; None: never."""
    over_sampling_groups: int = 0
    """Groups admitted beyond what staleness allows, so that a step is full in spite of drops."""
    limiter: Limiter | None = None
    shard: int = 0
    """This buffer is one of `num_shards` and has the groups whose number is `shard` modulo num_shards."""
    num_shards: int = 1
    vocab_size: int | None = None
    """Token ids of samples are below it; None: not checked here."""
    needs_reward: bool = False
    """A COMPLETED or TRUNCATED sample without a reward is stored as FAILED."""

    @property
    def has_source(self) -> bool:
        """True when prompts come from files or a data source, too."""
        return bool(self.files) or self.data_source is not None

    def with_limits_of(self, other: StreamConfig) -> StreamConfig:
        """Returns this config with the other's limits, which may change while groups exist."""
        return replace(self, **{name: getattr(other, name) for name in _LIMITS})


_BOUNDS = {
    "n_samples_per_prompt": (1, MAX_SAMPLES_PER_GROUP),
    "groups_per_step": (1, MAX_GROUPS_PER_STEP),
    "max_staleness": (0, MAX_STALENESS),
    "max_attempts": (1, MAX_ATTEMPTS),
    "max_payload_bytes": (1, MAX_COUNTER),
    "max_queued_groups": (1, MAX_GROUPS),
    "max_groups": (1, MAX_GROUPS),
    "max_leases": (1, MAX_GROUPS),
    "retain_steps": (0, MAX_STALENESS),
    "over_sampling_groups": (0, MAX_GROUPS_PER_STEP),
    "num_shards": (1, MAX_SHARDS),
    "vocab_size": (1, (1 << 31) - 1),
}
_FILE_BOUNDS = {
    "seed": (-_LARGEST_SEED - 1, _LARGEST_SEED),
    "num_epochs": (0, MAX_GROUPS),
    "first_row": (0, MAX_COUNTER),
    "end_row": (0, MAX_COUNTER),
    "num_workers": (1, MAX_FILE_WORKERS),
}
_FILE_KEYS = ("label_key", "metadata_key", "tool_key", "priority_key", "image_key")


def check_config(config: StreamConfig) -> None:
    """Raises InvalidArgument naming the field: what is stored can be sent back, and no step is too long.

    Every new config is checked, the job's own too.
    """
    if not _NAME.fullmatch(config.name) or any(part in ("", ".", "..") for part in config.name.split("/")):
        raise InvalidArgument(
            f"stream name {shown(config.name)} must be 1 to 128 letters, digits or ._/-, without an empty part or one "
            "that is . or ..",
            field="config.name",
        )
    _require_bounds(config, _BOUNDS, "config")
    num_samples = config.groups_per_step * config.n_samples_per_prompt
    if num_samples > MAX_SAMPLES_PER_STEP:
        raise InvalidArgument(
            f"groups_per_step {config.groups_per_step} x n_samples_per_prompt {config.n_samples_per_prompt} is "
            f"{num_samples}, a step may have {MAX_SAMPLES_PER_STEP} samples: use several shards",
            field="config.groups_per_step",
        )
    require_finite(config.lease_seconds, "config.lease_seconds", least=_LEAST_LEASE_SECONDS, most=MAX_LEASE_SECONDS)
    if not 0 <= config.shard < config.num_shards:
        raise InvalidArgument(
            f"shard {config.shard} of {config.num_shards}: they are counted from 0", field="config.shard"
        )
    if config.limiter:
        config.limiter.check(config.groups_per_step)
        require_between(config.limiter.min_size, 1, MAX_GROUPS, "config.limiter.min_size_to_sample")
        require_finite(config.limiter.error_buffer or 0.0, "config.limiter.error_buffer", most=MAX_GROUPS)
    require_at_most(len(config.files), MAX_FILES, "config.files")
    for file in config.files:
        _check_file(file)


def _check_file(file: FileSource) -> None:
    require_path(file.path, "config.files.path")
    require_name(file.input_key, "config.files.input_key")
    for name in _FILE_KEYS:
        optional_name(getattr(file, name) or "", f"config.files.{name}")
    _require_bounds(file, _FILE_BOUNDS, "config.files")
    require_finite(file.weight, "config.files.weight", least=1 / MAX_FILE_WEIGHT, most=MAX_FILE_WEIGHT)
    if file.end_row is not None and file.end_row <= file.first_row:
        raise InvalidArgument(
            f"{file.path}@[{file.first_row}:{file.end_row}] has no rows: the end must be above the start",
            field="config.files.end_row",
        )


def _require_bounds(message: StreamConfig | FileSource, bounds: Mapping[str, tuple[int, int]], field: str) -> None:
    for name, (least, most) in bounds.items():
        value: int | None = getattr(message, name)
        if value is not None:
            require_between(value, least, most, f"{field}.{name}")


class StreamState(msgspec.Struct, frozen=True):
    """The durable state of a stream apart from its groups."""

    config: StreamConfig
    epoch: int = 0
    """The trainer's epoch; 0 before the first Rewind."""
    epoch_start: int = 0
    """The step of the latest Rewind."""
    step: int = 0
    """The step to be consumed next; every step below it is consumed."""
    committed_step: int = 0
    policy_version: int = 0
    policy_epoch: int = 0
    """The epoch in which policy_version was set: within one it never goes back."""
    next_seq: int = 0
    cursors: tuple[Cursor, ...] = ()
    """One for each file (one for a data source)."""
    exhausted: bool = False
    """All epochs of all sources were read."""
    ended: tuple[bool, ...] = ()
    """One flag for each source: all its epochs were read."""
    taken: tuple[int, ...] = ()
    """How many groups of each source were ever given to a batch."""
    bad_lines: int = 0
    """Bad lines found when the files were opened."""
    file_digests: tuple[str, ...] = ()
    """Digests of the files' contents: a cursor means nothing in another file."""
    rewinds: Mapping[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """request_id → (epoch, groups that are READY again)."""
    retries: Mapping[str, int] = msgspec.field(default_factory=dict)
    """request_id → groups that were queued again."""
    drops: Mapping[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """request_id → (groups that were dropped, batches that were dissolved)."""
    num_inserted: int = 0
    """How many groups ever became READY; the limiter counts them."""
    num_taken: int = 0
    """How many groups were ever given to a batch."""
    forgotten_step: int = 0
    """Ended groups of every step below it are deleted."""
    forgotten: Mapping[str, int] = msgspec.field(default_factory=dict)
    """State → number of its groups that were deleted."""
    deleted: bool = False
    """The stream was deleted; its row stays, so that its group numbers and epochs are not used again."""
    created_at: int = 0
    """Position of its `stream_created` event, which no other stream has; 0 for streams of earlier releases."""
    first_seq: int = 0
    """Its first group's number. Lower ones were those of deleted streams with the same name."""

    @property
    def name(self) -> str:
        return self.config.name

    def has_ended(self, source: int) -> bool:
        return self.ended[source] if self.ended else self.exhausted

    def taken_of(self, source: int) -> int:
        return self.taken[source] if self.taken else 0

    @property
    def prompts_read(self) -> int:
        return sum(cursor.prompts_read for cursor in self.cursors)

    @property
    def num_bad_lines(self) -> int:
        return self.bad_lines + sum(cursor.bad_lines for cursor in self.cursors)

    @property
    def data_epoch(self) -> int:
        """The epoch of the source that is furthest behind; 0 without sources."""
        return min((cursor.epoch for cursor in self.cursors), default=0)
