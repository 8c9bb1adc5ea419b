"""A stream: a prompt source plus an admission rule. The config is fixed at creation, the state moves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.errors import InvalidArgument

DEFAULT_LEASE_SECONDS = 60.0
DEFAULT_MAX_ATTEMPTS = 3
DEFAULT_MAX_PAYLOAD_BYTES = 8 << 30
DEFAULT_MAX_QUEUED_GROUPS = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


class ExpiryAction(StrEnum):
    """What becomes of a group that grew too stale."""

    REQUEUE = "REQUEUE"
    DROP = "DROP"


class Selection(StrEnum):
    """In which order READY groups become a batch."""

    FIFO = "FIFO"
    LIFO = "LIFO"
    PRIORITY = "PRIORITY"
    FRESHEST = "FRESHEST"


@dataclass(frozen=True, slots=True)
class FileSource:
    """Prompts read from a JSONL file."""

    path: str
    input_key: str
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    shuffle: bool = False
    seed: int = 0
    num_epochs: int | None = None
    skip_bad_lines: bool = False


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
    file: FileSource | None = None
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    max_queued_groups: int = DEFAULT_MAX_QUEUED_GROUPS

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"stream name {self.name!r} must be 1 to 128 letters, digits or ._/-", field="config.name"
            )
        for name in ("n_samples_per_prompt", "groups_per_step", "max_attempts"):
            value: int = getattr(self, name)
            if value < 1:
                raise InvalidArgument(f"{name} is {value}, must be at least 1", field=f"config.{name}")
        if not (math.isfinite(self.lease_seconds) and self.lease_seconds > 0):
            raise InvalidArgument(
                f"lease_seconds is {self.lease_seconds}, must be above 0", field="config.lease_seconds"
            )

    def with_limits_of(self, other: StreamConfig) -> StreamConfig:
        """This config under the limits of the other: what may change while groups exist."""
        return replace(
            self,
            max_staleness=other.max_staleness,
            lease_seconds=other.lease_seconds,
            max_attempts=other.max_attempts,
            max_payload_bytes=other.max_payload_bytes,
            max_queued_groups=other.max_queued_groups,
        )


@dataclass(frozen=True, slots=True)
class Cursor:
    """The walk over a prompt file: everything before (epoch, row) has been made into groups."""

    epoch: int = 0
    row: int = 0
    prompts_read: int = 0


@dataclass(frozen=True, slots=True)
class StreamState:
    """The durable state of a stream apart from its groups."""

    config: StreamConfig
    epoch: int = 0
    """The trainer's; 0 before the first Rewind."""
    epoch_start: int = 0
    """The step of the latest Rewind."""
    step: int = 0
    """To be consumed next; every step below it is consumed."""
    committed_step: int = 0
    policy_version: int = 0
    policy_epoch: int = 0
    """The epoch in which policy_version was set: within one it never goes back."""
    next_seq: int = 0
    cursor: Cursor = Cursor()
    exhausted: bool = False
    """The file's epochs are walked to the end."""
    bad_lines: int = 0
    file_digest: str = ""
    """SHA-256 of the prompt file: the cursor means nothing in another file."""
    rewinds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """request_id → (epoch, groups that came back)."""

    @property
    def name(self) -> str:
        return self.config.name
