"""Makes transactions durable in their order, and streams the history that they make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.errors import DataLoss, OutOfRange, RetryableError, Unavailable
from headrace.rpc.log import log
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.store.base import Store


class Signal:
    """Take a `ticket` first, look second, wait third: a change between looking and waiting is not missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Returns an event that the next change sets."""
        return self._event

    def set(self) -> None:
        """Wakes all who have a ticket."""
        self._event.set()
        self._event = asyncio.Event()


async def wait_for(ticket: asyncio.Event, seconds: float) -> bool:
    """Returns True when the change came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await ticket.wait()
    except TimeoutError:
        return False
    return True


_KEPT = 4096


class EventCache:
    """Holds at least the latest `_KEPT` events since the start of the process."""

    def __init__(self) -> None:
        self._events: list[LedgerEvent] = []

    def add(self, events: Sequence[LedgerEvent]) -> None:
        """Adds durable events, in order of position."""
        self._events += events
        if len(self._events) > 2 * _KEPT:
            del self._events[:-_KEPT]

    def read(self, from_position: int, count: int) -> list[LedgerEvent] | None:
        """Returns None when the events have to be read from the store."""
        if not self._events:
            return None
        skipped = from_position - self._events[0].position
        return self._events[skipped : skipped + count] if skipped >= 0 else None


# Makes transactions durable in the order in which they were made, several with one sync where they come together.
# queued → (while another commit runs: their payloads are written ahead, in a thread of their own) → committed →
#   answered
# Consumes transactions from the event loop, unblocks their callers and the watchers. Nothing leaves the process before
# it is durable. A write error is the end: memory is ahead of the disk from then on.


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
        self.event_cache = EventCache()
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
            self.event_cache.add([event for t in transactions for event in t.events])
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


_EVENTS_PER_PAGE = 500
_READERS = 2


class EventStream:
    """Streams the history from any position, then live. Each watcher reads at its own pace and delays nobody.

    Live watchers are served from memory. One that falls behind by more than `max_lag` events is cut off with the
    position at which it may continue: the ledger keeps no queue for it.
    """

    def __init__(self, journal: Journal, store: Store, max_lag: int) -> None:
        self._journal = journal
        self._store = store
        self._max_lag = max_lag
        self._readers = BlockingPool("history", _READERS)

    async def watch(self, from_position: int) -> AsyncIterator[list[LedgerEvent]]:
        """Yields events; position 0 is the oldest stored. Raises OutOfRange outside of the history or when too slow."""
        position = from_position or self._journal.oldest_position
        self._require_kept(position)
        if position > self._journal.durable_position + 1:
            raise OutOfRange(
                f"position {position} is not written yet: the latest is {self._journal.durable_position}",
                latest_position=str(self._journal.durable_position),
            )
        is_live = False
        while True:
            ticket = self._journal.advanced.ticket()
            lag = self._journal.durable_position + 1 - position
            if is_live and lag > self._max_lag:
                raise OutOfRange(
                    f"this watcher is {lag} events behind, more than {self._max_lag}: "
                    f"read faster, and watch again from position {position}",
                    position=str(position),
                )
            if lag == 0:
                is_live = True
                await ticket.wait()
                continue
            events = self._journal.event_cache.read(position, _EVENTS_PER_PAGE)
            if events is None:
                events = await self._readers.run(self._store.read_events, position, _EVENTS_PER_PAGE)
            events = events[: _num_without_gap(events, position)]
            if not events:
                await self._refuse_gap(position)
            position = events[-1].position + 1
            yield events
            del events  # not kept while the next is waited for

    async def _refuse_gap(self, position: int) -> None:
        """Raises OutOfRange when the position was deleted, DataLoss when its event is missing."""
        self._require_kept(position)
        behind = await self._readers.run(self._store.read_events, position, 1)
        following = behind[0].position if behind else self._journal.durable_position + 1
        raise DataLoss(
            f"the history has lost its events {position} to {following - 1}: watch from position {following}",
            next_position=str(following),
        )

    def _require_kept(self, position: int) -> None:
        oldest = self._journal.oldest_position
        if position < oldest:
            raise OutOfRange(
                f"events before position {oldest} are deleted (retain_events), {position} is one of them: "
                f"watch from {oldest}, or from 0",
                oldest_position=str(oldest),
            )


def _num_without_gap(events: Sequence[LedgerEvent], position: int) -> int:
    if events and events[-1].position == position + len(events) - 1:
        return len(events)
    return next((i for i, event in enumerate(events) if event.position != position + i), len(events))
