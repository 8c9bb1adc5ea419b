"""Passes a command's changes on: to the journal and, once they are durable, to the calls that wait for them.

Waits of a stream end when anything in it changes. Deleted samples release their columns when the deletion is durable;
groups that became READY are then given to the data source that wants to see them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

from headrace.errors import Unavailable
from services.buffer.ledger.commands.work import NewSample
from services.buffer.ledger.ledger import Ledger, Result
from services.buffer.ledger.transaction import Transaction
from services.buffer.runtime.journal import Journal
from services.buffer.runtime.signal import Signal, wait_for
from services.buffer.store.columns import Columns

_Answer = TypeVar("_Answer")
_SETTLE_AGAIN_SECONDS = 0.5

Generated = Callable[[Transaction], Awaitable[None]]
"""Is told of every durable transaction."""


class Changes:
    """Unblocked by the journal."""

    def __init__(self, ledger: Ledger, journal: Journal, columns: Columns, generated: Generated) -> None:
        self._ledger = ledger
        self._journal = journal
        self._columns = columns
        self._generated = generated
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, result: Result[_Answer]) -> _Answer:
        """Returns the answer once the transaction is durable."""
        answer, transaction = result
        durable = self._journal.append(transaction)
        for name in {e.stream for e in transaction.events}:
            self._changed[name].set()
        if transaction.deleted_payloads:
            self._later(self._release_columns(transaction.deleted_payloads))
        try:
            await durable
        except Unavailable:
            self._later(self._generated_when_durable(transaction))
            raise
        await self._generated(transaction)
        return answer

    def note(self, result: Result[None]) -> None:
        """Commits without waiting: what the caller commits next is behind it in the journal."""
        _ = self._journal.append(result[1])
        for name in {e.stream for e in result[1].events}:
            self._changed[name].set()

    async def commit_samples(self, samples: Sequence[NewSample], result: Result[_Answer]) -> _Answer:
        """Commits as `commit` does; columns of the stored samples are pinned from now on."""
        for sample in samples:
            if sample.record.key in result[1].payloads:
                self._columns.pin(sample.record, sample.columns)
        return await self.commit(result)

    async def wait_until_durable(self) -> None:
        """Waits until everything in memory is durable."""
        await self._journal.append(Transaction())

    async def wait(
        self, stream: str, attempt: Callable[[], Awaitable[_Answer | None]], seconds: float
    ) -> _Answer | None:
        """Attempts after every change of the stream until one gives an answer; returns None when none did in time."""
        end = time.monotonic() + seconds
        while True:
            ticket = self._changed[stream].ticket()
            answer = await attempt()
            left = end - time.monotonic()
            if answer is not None or left <= 0 or not await wait_for(ticket, left):
                return answer

    async def _release_columns(self, keys: Sequence[str]) -> None:
        """Runs to its end even when the call that deleted the samples was cancelled."""
        if await self._durable_at_last():
            self._columns.release(keys)

    async def _generated_when_durable(self, transaction: Transaction) -> None:
        if await self._durable_at_last():
            await self._generated(transaction)

    async def _durable_at_last(self) -> bool:
        """Waits even while the store is away; returns False when it has failed and the process is ending."""
        while not self._journal.failed.done():
            try:
                await self.wait_until_durable()
            except Unavailable:
                await asyncio.sleep(_SETTLE_AGAIN_SECONDS)
            else:
                return True
        return False

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
