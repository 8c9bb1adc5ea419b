"""Makes transactions durable in the order in which they were made, several with one sync where they come together.

queued → (while another commit runs: their payloads are written ahead, in a thread of their own) → committed → answered
Consumes transactions from the event loop, unblocks their callers and the watchers. Nothing leaves the process before it
is durable. A write error is the end: memory is ahead of the disk from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.errors import RetryableError, Unavailable
from headrace.rpc.log import log
from services.buffer.ledger.transaction import Transaction
from services.buffer.runtime.signal import Signal
from services.buffer.runtime.tail import Tail
from services.buffer.store.base import Store


@dataclass(slots=True, eq=False)
class _Batch:
    """Transactions that become durable with one sync."""

    durable: asyncio.Future[None]
    transactions: list[Transaction] = field(default_factory=list)


class Journal:
    """`failed` is set with the error that ended it."""

    def __init__(self, store: Store, position: int, oldest_position: int = 1) -> None:
        loop = asyncio.get_running_loop()
        self.durable_position = position
        self.oldest_position = oldest_position
        """The first position of the history that the store still has."""
        self.advanced = Signal()
        self.tail = Tail()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._store = store
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="payloads")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._next = _Batch(loop.create_future())
        self._queued: list[_Batch] = []
        self._unanswered: list[_Batch] = []
        """Being prepared, queued, or being committed."""
        self._taking: asyncio.Task[None] | None = None
        self._committing: asyncio.Task[None] | None = None

    def append(self, transaction: Transaction) -> Awaitable[None]:
        """Queues the transaction; the result can be awaited until it, and everything before it, is durable."""
        if self.failed.done():
            raise Unavailable("the ledger's disk failed, its process is ending: try again when it is back")
        self._next.transactions.append(transaction)
        durable = self._next.durable
        if not _runs(self._taking):
            self._taking = asyncio.create_task(self._take())
        # A caller that is cancelled must not cancel the others' future.
        waiting = asyncio.shield(durable)
        waiting.add_done_callback(_retrieved)
        return waiting

    def refuse(self, error: RetryableError) -> None:
        """Tells all who wait that there is no answer now. Their transactions stay queued, in order."""
        for batch in (*self._unanswered, self._next):
            if not batch.durable.done():
                batch.durable.set_exception(error)

    async def close(self) -> None:
        """Waits until everything queued is durable."""
        if self._taking:
            await self._taking
        if self._committing:
            await self._committing
        self._preparer.shutdown()
        self._committer.shutdown()

    async def _take(self) -> None:
        while self._next.transactions and not self.failed.done():
            batch, self._next = self._next, _Batch(asyncio.get_running_loop().create_future())
            self._unanswered.append(batch)
            if _runs(self._committing) and any(t.payloads for t in batch.transactions):
                await self._run(self._preparer, self._store.prepare, batch.transactions)
            self._queued.append(batch)
            if not _runs(self._committing):
                self._committing = asyncio.create_task(self._commit())

    async def _commit(self) -> None:
        while self._queued and not self.failed.done():
            batches, self._queued = self._queued, []
            transactions = [t for batch in batches for t in batch.transactions]
            await self._run(self._committer, self._store.commit, transactions)
            if self.failed.done():
                return
            self._advance(transactions)
            for batch in batches:
                self._unanswered.remove(batch)
                if not batch.durable.done():
                    batch.durable.set_result(None)

    async def _run(
        self,
        thread: ThreadPoolExecutor,
        write: Callable[[Sequence[Transaction]], None],
        transactions: Sequence[Transaction],
    ) -> None:
        changed = [t for t in transactions if t.events or t.streams or t.forgotten]
        try:
            if changed:
                await asyncio.get_running_loop().run_in_executor(thread, write, changed)
        except Exception as error:  # noqa: BLE001  # whatever it is, the disk does not have what memory has
            if not self.failed.done():
                self._fail(error)  # first: the log may be on the same disk
                log.critical("ledger_write_failed", exc_info=error)

    def _advance(self, transactions: Sequence[Transaction]) -> None:
        positions = [t.events[-1].position for t in transactions if t.events]
        if positions:
            self.tail.add([event for t in transactions for event in t.events])
            self.durable_position = positions[-1]
            self.oldest_position = max(self.oldest_position, *(t.events_from or 0 for t in transactions))
            self.advanced.set()

    def _fail(self, error: Exception) -> None:
        self.failed.set_exception(error)
        self.failed.exception()  # read: a server that is ending by itself does not ask
        self.refuse(Unavailable("the ledger's disk failed, its process is ending: try again later"))
        for batch in (*self._unanswered, self._next):
            _retrieved(batch.durable)


def _runs(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()


def _retrieved(waiting: asyncio.Future[None]) -> None:
    """Prevents a report about a batch that nobody waits for."""
    if not waiting.cancelled():
        waiting.exception()
