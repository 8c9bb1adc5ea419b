"""What a ledger asks of a disk. `memory`, `sqlite` and `postgres` keep the same contract tests.

`commit` is called by one thread, `prepare` by another; the reads come from others at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import RetryableError
from services.buffer.ledger.group import Group, SampleRecord
from services.buffer.ledger.stream import StreamState
from services.buffer.ledger.transaction import LedgerEvent, Payload, Transaction
from services.buffer.store.copy import CopiedFile


@dataclass(frozen=True, slots=True)
class Damage:
    """Something on the disk that is not as it was written: it is left there and not served."""

    what: str
    group_id: str | None = None
    sample_id: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a ledger needs to go on."""

    ledger_id: str
    streams: tuple[StreamState, ...]
    groups: tuple[Group, ...]
    position: int
    oldest_position: int = 1
    """Of the history: what was before it is deleted."""
    lost_streams: tuple[str, ...] = ()
    """Streams whose own row is damaged: their groups are not loaded, and their names are not free."""
    lost_groups: tuple[str, ...] = ()
    """Ids of groups that cannot be loaded, because records of theirs are damaged, of the other streams."""
    torn_bytes: int = 0
    """Cut off the end: what was being written, and was never answered, when the process before this one ended."""


class Store(Protocol):
    """Durable rows. Any error of `commit` ends the process: memory would be ahead of the disk.

    It waits, and does not raise, where it can go on later: its database is away, or its disk is full.
    """

    def load(self) -> Snapshot:
        """What was committed, damaged records set aside."""

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        """Writes ahead what a later `commit` of them names. Nothing of it is there before that."""

    def commit(self, transactions: Sequence[Transaction]) -> None:
        """Durable, all or nothing, when it returns. They were prepared, or are now."""

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        """In order. Raises NotFound for a payload that was deleted, DataLoss for one that does not match its digest."""

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        """The history from a position on, at most `count`."""

    @property
    def name(self) -> str:
        """Of the kind of store, as the job's buffer_store says it."""

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        """Files of a consistent copy as of now, there while the context is. Raises FailedPrecondition without files."""

    def damage(self) -> Sequence[Damage]:
        """Everything found so far that is not as it was written: by `load`, and by reading since."""

    def free_bytes(self) -> int | None:
        """What is left on its disk; None where nobody can say."""

    @property
    def waiting_for(self) -> RetryableError | None:
        """What callers are told while `commit` waits; None while it does not."""

    def stop_waiting(self) -> None:
        """`commit` raises instead of waiting longer."""

    def close(self) -> None:
        """No call comes after it."""
