"""The changes of one command, which become durable together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headrace.protobuf import Payload
from services.buffer.ledger.group import Group, GroupState, NewSample
from services.buffer.ledger.stream import StreamState


@dataclass(frozen=True, slots=True)
class Instant:
    """The current time on two clocks: leases use monotonic seconds, the history Unix seconds."""

    monotonic: float
    unix: float


class LedgerEvent(msgspec.Struct, frozen=True, gc=False):
    """One transition. Positions are 1, 2, 3, … without gaps over the whole ledger."""

    position: int
    unix_seconds: float
    stream: str
    kind: str
    group_id: str | None = None
    state: GroupState | None = None
    epoch: int | None = None
    step: int | None = None
    policy_version: int | None = None
    sample_ids: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Transaction:
    """The rows to write and to delete. It is empty when a command changed nothing."""

    streams: dict[str, StreamState] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    new_groups: list[str] = field(default_factory=list)
    forgotten: list[Group] = field(default_factory=list)
    """Groups that are deleted, with their prompts; applied after `groups`."""
    payloads: dict[str, Payload] = field(default_factory=dict)
    """Payloads by SampleRecord.key; the records are in `groups`."""
    with_columns: list[NewSample] = field(default_factory=list)
    """Those samples of `payloads` that name columns out of line."""
    deleted_payloads: list[str] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    events_from: int | None = None
    """Events below this position are deleted."""
