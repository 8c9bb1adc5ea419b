"""Makes transactions durable in the order in which they were made, several with one sync where they come together.

Consumes transactions from the event loop, one writer thread commits them, unblocks their callers and the watchers.
Nothing leaves the process before it is durable. A write error is the end: memory is ahead of the disk from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import Unavailable
from headrace.rpc.log import log
from services.buffer.signal import Signal
from services.buffer.store.base import Store
from services.buffer.tail import Tail
from services.buffer.transaction import Transaction


class Journal:
    """`failed` is set with the error that ended it."""

    def __init__(self, store: Store, position: int, oldest_position: int = 1) -> None:
        self.durable_position = position
        self.oldest_position = oldest_position
        """Of the history that the store keeps."""
        self.advanced = Signal()
        self.tail = Tail()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Transaction] = []
        self._next_batch: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._being_written: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None

    def append(self, transaction: Transaction) -> Awaitable[None]:
        """Queues it at once; what is returned waits until it, and everything before it, is durable."""
        if self.failed.done():
            raise Unavailable("the ledger's disk failed, its process is ending: try again when it is back")
        self._pending.append(transaction)
        batch = self._next_batch
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        # A caller that is cancelled must not cancel the others' future.
        waiting = asyncio.shield(batch)
        waiting.add_done_callback(_retrieved)
        return waiting

    def refuse(self, error: Unavailable) -> None:
        """Tells all who wait that they cannot be answered now. What they asked for stays queued, in its order."""
        for batch in (self._being_written, self._next_batch):
            if batch is not None and not batch.done():
                batch.set_exception(error)

    async def close(self) -> None:
        """Waits for what is queued."""
        if self._writing:
            await self._writing
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            transactions, self._pending = self._pending, []
            batch, self._next_batch = self._next_batch, loop.create_future()
            self._being_written = batch
            try:
                await self._commit(transactions)
            except Exception as error:  # whatever it is, the disk does not have what memory has
                self._fail(error, batch)  # first: the log may be on the same disk
                log.critical("ledger_write_failed", exc_info=error)
                return
            self._advance(transactions)
            if not batch.done():
                batch.set_result(None)

    async def _commit(self, transactions: Sequence[Transaction]) -> None:
        changed = [t for t in transactions if t.events or t.streams]
        if changed:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit, changed)

    def _advance(self, transactions: Sequence[Transaction]) -> None:
        positions = [t.events[-1].position for t in transactions if t.events]
        if positions:
            self.tail.add([event for t in transactions for event in t.events])
            self.durable_position = positions[-1]
            self.oldest_position = max(self.oldest_position, *(t.events_from or 0 for t in transactions))
            self.advanced.set()

    def _fail(self, error: Exception, batch: asyncio.Future[None]) -> None:
        self.failed.set_exception(error)
        self.failed.exception()  # read: a server that is ending by itself does not ask
        self._being_written = batch
        self.refuse(Unavailable("the ledger's disk failed, its process is ending: try again later"))
        for waiting in (batch, self._next_batch):
            _retrieved(waiting)


def _retrieved(waiting: asyncio.Future[None]) -> None:
    """A batch that nobody waits for is not reported."""
    if not waiting.cancelled():
        waiting.exception()
