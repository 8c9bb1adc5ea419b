"""One prompt and what became of it.

QUEUED → LEASED → READY → CONSUMED → COMMITTED, with DROPPED and FAILED at the side. A READY group with a `step` is in
that step's batch. Groups are frozen: every transition makes another, which is durable before anybody hears of it.

Structs of msgspec and not dataclasses: to make the next version of one costs a tenth, and the cyclic collector, which
would walk millions of them, passes them by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec

from headrace.errors import Internal
from headrace.limits import MAX_ANSWER_BYTES
from headrace.protobuf import Payload
from headrace.trajectory import Failure

_LEASE_BYTES = 512
"""A lease without its prompt: two ids and some numbers."""


class GroupState(StrEnum):
    """The proto's GroupState without its prefix."""

    QUEUED = "QUEUED"
    LEASED = "LEASED"
    READY = "READY"
    CONSUMED = "CONSUMED"
    COMMITTED = "COMMITTED"
    DROPPED = "DROPPED"
    FAILED = "FAILED"

    __hash__ = str.__hash__  # an Enum's own is a Python function, called several times in every transition


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the ledger stores it; `body` is a serialized message that the ledger does not read."""

    prompt_id: str
    body: bytes
    priority: int = 0


def payload_key(lease_id: str, index: int) -> str:
    """Names the `index`-th payload that ended a lease. A lease ends once, so no key is used twice.

    Names of streams, groups and samples may hold anything, "/" and "#" too. A lease id is made of the stream's name,
    the group's number and the lease's: two leases never share a key.
    """
    return f"{lease_id}/{index}"


class SampleRecord(msgspec.Struct, frozen=True, gc=False):
    """A sample's entry in the ledger; its payload is in the store under `key`."""

    key: str
    sample_id: str
    index: int
    digest: bytes
    payload_bytes: int
    oldest_version: int | None
    """None when no policy sampled any of its tokens."""
    envelope: bytes
    reward: float | None = None
    """None when the sample has no score or failed."""
    column_bytes: int = 0
    """Bytes of the columns that are stored out of line."""

    @property
    def stored_bytes(self) -> int:
        """Everything that the store holds for the sample."""
        return self.payload_bytes + self.column_bytes + len(self.envelope)


class NewSample(msgspec.Struct, frozen=True, gc=False):
    """A sample as a producer put it."""

    record: SampleRecord
    payload: Payload
    columns: tuple[bytes, ...] = ()
    """SHA-256 of the columns that are stored out of line."""
    newest_version: int | None = None
    """The newest version of all its tokens, masked ones too."""
    rollout_id: str = ""
    """The execution that produced it; its own id unless that fanned out."""
    failure: Failure | None = None
    """Set when it FAILED."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A producer's exclusive right to a group; only the LeaseTable knows when it ends."""

    lease_id: str
    producer_id: str
    request_id: str
    policy_version: int


class EndedLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that was put: the same put again is a duplicate."""

    lease_id: str
    fingerprint: bytes


class Group(msgspec.Struct, frozen=True, gc=False):
    """The whole durable state of a group."""

    group_id: str
    stream: str
    seq: int
    prompt: Prompt
    state: GroupState = GroupState.QUEUED
    attempts: int = 0
    """Leases that count against max_attempts."""
    num_leases: int = 0
    """All leases ever; makes lease ids unique."""
    lease: Lease | None = None
    admitted_at: int = 0
    """Position of the latest lease's event: the order of admission."""
    samples: tuple[SampleRecord, ...] = ()
    partials: tuple[SampleRecord, ...] = ()
    oldest_version: int | None = None
    step: int | None = None
    batch_index: int | None = None
    failure: Failure | None = None
    ended_step: int | None = None
    """COMMITTED or DROPPED with this step: retention counts from it."""
    ended: tuple[EndedLease, ...] = ()
    position: int = 0
    """The position of its latest event."""
    source: int | None = None
    """The number of the stream's source that its prompt was read from; None: submitted."""

    @property
    def live_lease(self) -> Lease:
        if self.lease is None:
            raise Internal(f"group {self.group_id} is {self.state.value} and has no lease")
        return self.lease

    @property
    def records(self) -> tuple[SampleRecord, ...]:
        """All samples of the group that have a payload in the store."""
        if self.state in (GroupState.READY, GroupState.CONSUMED):
            return (*self.samples, *self.partials) if self.partials else self.samples
        return self.partials

    @property
    def lease_bytes(self) -> int:
        """Estimates how large the group's lease is in an answer."""
        partials = sum([record.payload_bytes + len(record.envelope) for record in self.partials])
        return len(self.prompt.body) + partials + _LEASE_BYTES

    @property
    def answer_bytes(self) -> int:
        """Estimates how large the group is in an answer, with its prompt and envelopes."""
        return len(self.prompt.body) + sum([len(record.envelope) for record in self.samples]) + _LEASE_BYTES

    @property
    def rewards(self) -> list[float]:
        return [record.reward for record in self.samples if record.reward is not None]

    @property
    def payload_bytes(self) -> int:
        return sum(record.payload_bytes for record in self.records)


# Answers are limited in bytes: lists are cut into as many messages as they need.


_Item = TypeVar("_Item")
_MOST_ITEMS = 2_048


def sample_chunks(records: Iterable[SampleRecord]) -> Iterator[list[SampleRecord]]:
    """Cuts samples into messages by their payloads' sizes. A sample larger than a message should be is alone in one."""
    return cut(records, lambda record: record.payload_bytes + len(record.envelope))


def cut(items: Iterable[_Item], size: Callable[[_Item], int], most: int = MAX_ANSWER_BYTES) -> Iterator[list[_Item]]:
    """Cuts the items into chunks that fit one answer each."""
    some: list[_Item] = []
    num_bytes = 0
    for item in items:
        item_bytes = size(item)
        if some and (num_bytes + item_bytes > most or len(some) == _MOST_ITEMS):
            yield some
            some, num_bytes = [], 0
        some.append(item)
        num_bytes += item_bytes
    if some:
        yield some


def first_within(items: Iterable[_Item], size: Callable[[_Item], int], most: int = MAX_ANSWER_BYTES) -> list[_Item]:
    """Returns the first items, as many as fit one answer."""
    return next(cut(items, size, most), [])
