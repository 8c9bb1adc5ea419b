"""The order in which transactions become durable, and what happens beside a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from headrace.errors import Unavailable
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.runtime.journal import Journal
from services.buffer.store.memory import MemoryStore

_SECONDS = 60.0


class HeldStore(MemoryStore):
    """Its first commit waits until it is released."""

    def __init__(self, prepare_error: OSError | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []
        self.released, self.committing, self.prepared = (threading.Event() for _ in range(3))
        self._prepare_error = prepare_error

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        self.calls.append(("prepare", positions(transactions)))
        self.prepared.set()
        if self._prepare_error:
            raise self._prepare_error

    def commit(self, transactions: Sequence[Transaction]) -> None:
        self.calls.append(("commit", positions(transactions)))
        self.committing.set()
        assert self.released.wait(_SECONDS)
        super().commit(transactions)


def positions(transactions: Sequence[Transaction]) -> list[int]:
    return [event.position for t in transactions for event in t.events]


def transaction(position: int, *, payload: bool = False) -> Transaction:
    event = LedgerEvent(position, 0.0, "train", "put")
    return Transaction(events=[event], payloads={f"key {position}": b"payload"} if payload else {})


async def test_payloads_are_written_beside_the_commit_before_and_answered_in_order() -> None:
    store = HeldStore()
    journal = Journal(store, 0)
    first = journal.append(transaction(1, payload=True))
    await asyncio.to_thread(store.committing.wait, _SECONDS)
    second = asyncio.ensure_future(journal.append(transaction(2, payload=True)))
    await asyncio.to_thread(store.prepared.wait, _SECONDS)
    third = asyncio.ensure_future(journal.append(transaction(3)))
    assert journal.durable_position == 0
    store.released.set()
    await first
    await asyncio.gather(second, third)
    await journal.close()
    assert store.calls[:2] == [("commit", [1]), ("prepare", [2])]
    assert [p for name, several in store.calls if name == "commit" for p in several] == [1, 2, 3]
    assert journal.durable_position == 3


async def test_nothing_is_committed_once_payloads_could_not_be_written() -> None:
    store = HeldStore(OSError(28, "No space left on device"))
    journal = Journal(store, 0)
    first = journal.append(transaction(1))
    await asyncio.to_thread(store.committing.wait, _SECONDS)
    second = journal.append(transaction(2, payload=True))
    with pytest.raises(OSError, match="No space left"):
        await journal.failed
    store.released.set()
    for waiting in (first, second):
        with pytest.raises(Unavailable, match="disk failed"):
            await waiting
    with pytest.raises(Unavailable, match="its process is ending"):
        journal.append(transaction(3))
    await journal.close()
    assert [several for name, several in store.calls if name == "commit"] == [[1]]
