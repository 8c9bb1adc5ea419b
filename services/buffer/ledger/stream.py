"""A stream: a prompt source plus an admission rule. The config is fixed at creation, the state moves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from headrace.errors import InvalidArgument
from headrace.limits import shown
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.source import Cursor, FileSource

DEFAULT_LEASE_SECONDS = 60.0
DEFAULT_MAX_ATTEMPTS = 3
DEFAULT_MAX_PAYLOAD_BYTES = 8 << 30
DEFAULT_MAX_QUEUED_GROUPS = 1_000_000
DEFAULT_MAX_GROUPS = 2_000_000
DEFAULT_MAX_LEASES = 100_000

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
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
class StreamConfig:
    """Raises InvalidArgument when a value is out of range."""

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

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"stream name {shown(self.name)} must be 1 to 128 letters, digits or ._/-", field="config.name"
            )
        for name in ("n_samples_per_prompt", "groups_per_step", "max_attempts"):
            value: int = getattr(self, name)
            if value < 1:
                raise InvalidArgument(f"{name} is {value}, must be at least 1", field=f"config.{name}")
        if not (math.isfinite(self.lease_seconds) and self.lease_seconds > 0):
            raise InvalidArgument(
                f"lease_seconds is {self.lease_seconds}, must be above 0", field="config.lease_seconds"
            )
        if not 0 <= self.shard < self.num_shards:
            raise InvalidArgument(
                f"shard {self.shard} of {self.num_shards}: they are counted from 0", field="config.shard"
            )
        if self.vocab_size is not None and not 0 < self.vocab_size < 1 << 31:
            raise InvalidArgument(f"vocab_size is {self.vocab_size}, must be 1 or more", field="config.vocab_size")
        if self.limiter:
            self.limiter.check(self.groups_per_step)

    @property
    def has_source(self) -> bool:
        """True when prompts come from files or a data source, too."""
        return bool(self.files) or self.data_source is not None

    def with_limits_of(self, other: StreamConfig) -> StreamConfig:
        """Returns this config with the other's limits, which may change while groups exist."""
        return replace(self, **{name: getattr(other, name) for name in _LIMITS})


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
        """True when all epochs of the source were read."""
        return self.ended[source] if self.ended else self.exhausted

    def taken_of(self, source: int) -> int:
        """Counts the source's groups that were ever given to a batch."""
        return self.taken[source] if self.taken else 0

    @property
    def prompts_read(self) -> int:
        """Counts the prompts read from all sources."""
        return sum(cursor.prompts_read for cursor in self.cursors)

    @property
    def num_bad_lines(self) -> int:
        """Counts the bad lines skipped so far."""
        return self.bad_lines + sum(cursor.bad_lines for cursor in self.cursors)

    @property
    def data_epoch(self) -> int:
        """The epoch of the source that is furthest behind; 0 without sources."""
        return min((cursor.epoch for cursor in self.cursors), default=0)
