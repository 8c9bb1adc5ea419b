"""The protocol of a ledger's store. Every store passes the same contract tests.

`commit` is called by one thread, `prepare` by another; reads come from others at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.digest import matches
from headrace.errors import DataLoss, NotFound, RetryableError
from headrace.protobuf import Payload
from services.buffer.ledger.group import Group, SampleRecord
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.ledger.stream import StreamState


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in the store that is not as it was written. It is left where it is and not served."""

    what: str
    group_id: str | None = None
    sample_id: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a ledger loads at its start."""

    ledger_id: str
    streams: tuple[StreamState, ...]
    groups: tuple[Group, ...]
    position: int
    oldest_position: int = 1
    """The history starts here; earlier events are deleted."""
    lost_streams: tuple[str, ...] = ()
    """Streams whose own row is damaged: their groups are not loaded, and their names are not free."""
    lost_groups: tuple[str, ...] = ()
    """Ids of groups of the other streams that cannot be loaded, because their records are damaged."""
    torn_bytes: int = 0
    """Bytes that were deleted: the process before this one was writing them when it ended, and never answered."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """`num_bytes` of the file at `path`; `name` is relative to the ledger's folder."""

    name: str
    path: Path
    num_bytes: int


class Store(Protocol):
    """Stores rows durably. Any error of `commit` ends the process, because memory would be ahead of the disk.

    It waits and does not raise while it can go on later: its database is away, or its disk is full.
    """

    def load(self) -> Snapshot:
        """Returns everything that was committed, except damaged records."""

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        """Writes payloads ahead of the `commit` that names them. Nothing of it is visible before that commit."""

    def commit(self, transactions: Sequence[Transaction]) -> None:
        """Makes the transactions durable, all or none, before it returns. It prepares those that are not."""

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        """Returns payloads in order. Raises NotFound for a deleted one, DataLoss for one that fails its digest."""

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        """Returns at most `count` events from a position on, those before the first that is damaged or missing.

        Raises DataLoss when the first one is damaged.
        """

    @property
    def name(self) -> str:
        """The kind of store, as the job's buffer_store names it."""

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        """Yields the files of a consistent copy. Raises FailedPrecondition when the store has no files."""

    def damage(self) -> Sequence[Damage]:
        """Returns everything that `load` and later reads found damaged."""

    def free_bytes(self) -> int | None:
        """Returns the free space of the store's disk, or None when it is unknown."""

    @property
    def waiting_for(self) -> RetryableError | None:
        """The error for callers while `commit` waits, else None."""

    def stop_waiting(self) -> None:
        """Makes `commit` raise instead of waiting longer."""

    def close(self) -> None:
        """Ends it: no other method may be called afterwards."""


def checked_payload(record: SampleRecord, payload: Payload | None) -> Payload:
    """Raises NotFound when the bytes are deleted, DataLoss when they are not those that were put."""
    if payload is None:
        raise NotFound(
            f"the payload of sample {record.sample_id} is gone: its group expired or was committed meanwhile"
        )
    if not matches(record.digest, payload):
        raise DataLoss(
            f"the payload of sample {record.sample_id} does not match the digest it was put with: the disk has "
            f"changed it; {way_out(record)}"
        )
    return payload


def way_out(record: SampleRecord) -> str:
    """Names the command that removes the sample's group, with whose id the key of a payload begins."""
    return f"headrace buffer drop --group {group_of(record.key)} --reason damaged takes its group out"


def group_of(key: str) -> str:
    """Returns the id of the group that a payload's key belongs to."""
    return key.rpartition("#")[0]
