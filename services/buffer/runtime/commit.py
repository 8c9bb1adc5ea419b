"""The one way to change the ledger: a command runs, its transaction becomes durable, and its answer is told."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from headrace.errors import Unavailable
from headrace.rpc.log import log
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.state import Instant, Transaction
from services.buffer.ledger.work import Command
from services.buffer.runtime.journal import Journal, Signal, wait_for
from services.buffer.runtime.spans import GroupSpans
from services.buffer.store.base import Store
from services.buffer.store.columns import Columns

_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")
_SETTLE_AGAIN_SECONDS = 0.5


def now() -> Instant:
    return Instant(time.monotonic(), time.time())


class Committer:
    """Runs commands. Unblocked by the journal.

    Waits of a stream end when anything in it changes. Columns are pinned when samples that name them are stored, and
    released when the deletion of their samples is durable.
    """

    def __init__(self, ledger: Ledger, journal: Journal, columns: Columns) -> None:
        self.ledger = ledger
        self.listeners: list[Callable[[Transaction], Awaitable[None]]] = []
        """They are told of every transaction that `commit` made durable."""
        self._journal = journal
        self._columns = columns
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._spans = GroupSpans(ledger)
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, command: Command[_P, _Answer], *args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        """Returns the command's answer once its transaction is durable. The command runs before anything is awaited."""
        answer, transaction = command(self.ledger, now(), *args, **kwargs)
        durable = self._append(transaction)
        try:
            await durable
        except Unavailable:
            self._later(self._tell_when_durable(transaction))
            raise
        await self._tell(transaction)
        return answer

    def start(self, command: Command[_P, _Answer], *args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        """Runs a command without waiting: what the caller commits next is behind it in the journal."""
        answer, transaction = command(self.ledger, now(), *args, **kwargs)
        _ = self._append(transaction)
        return answer

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

    def _append(self, transaction: Transaction) -> Awaitable[None]:
        durable = self._journal.append(transaction)
        self._spans.add(transaction)
        for sample in transaction.with_columns:
            self._columns.pin(sample.record, sample.columns)
        for name in {e.stream for e in transaction.events}:
            self._changed[name].set()
        if transaction.deleted_payloads:
            self._later(self._release_columns(transaction.deleted_payloads))
        return durable

    async def _tell(self, transaction: Transaction) -> None:
        for listener in self.listeners:
            await listener(transaction)

    async def _tell_when_durable(self, transaction: Transaction) -> None:
        if await self._is_durable_at_last():
            await self._tell(transaction)

    async def _release_columns(self, keys: Sequence[str]) -> None:
        """Runs to its end even when the call that deleted the samples was cancelled."""
        if await self._is_durable_at_last():
            self._columns.release(keys)

    async def _is_durable_at_last(self) -> bool:
        """Waits even while the store is unreachable; False when it has failed and the process is ending."""
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


_PULSE_SECONDS = 0.25
_STOPPED_SECONDS = 2.0
"""A pulse that comes later than this was kept from coming."""


class Pulse:
    """Ends leases at their deadline, and tells clients and operators while the store is unreachable.

    Leases start their full time again after their producers could not renew them: the store was unreachable, or this
    process did not run for some seconds (it was stopped, or its machine was).
    While the store is unreachable no lease expires, health is NOT_SERVING, and callers get the store's error:
    UNAVAILABLE for a database, RESOURCE_EXHAUSTED for a full disk. Everything in memory is durable once it is back.
    A store that gives up ends the process, through the journal.
    """

    def __init__(self, committer: Committer, store: Store, journal: Journal) -> None:
        self.listeners: list[Callable[[bool], Awaitable[None]]] = []
        """Are told False each time that the store becomes unreachable, and True when it is back."""
        self._ledger = committer.ledger
        self._committer = committer
        self._store = store
        self._journal = journal
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def require_store(self) -> None:
        """Raises while the store is unreachable. Call it before a command changes memory."""
        if away := self._store.waiting_for:
            raise away

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_PULSE_SECONDS)  # the store waits in another thread, and has no event to set
            late_seconds = time.monotonic() - began - _PULSE_SECONDS
            if late_seconds > _STOPPED_SECONDS:
                log.warning("buffer_was_stopped", seconds=round(late_seconds, 1))
                self._ledger.renew_all(now())
            await self._look_at_store()
            while not self._is_away and self._ledger.leases.is_due(now().monotonic):
                with suppress(Unavailable):  # the journal has failed, and the process is ending
                    log.info("leases_expired", num_groups=self._committer.start(Ledger.expire_leases))
                await asyncio.sleep(0)

    async def _look_at_store(self) -> None:
        away = self._store.waiting_for
        if away:
            self._journal.refuse(away)
        if bool(away) == self._is_away:
            return
        self._is_away = bool(away)
        log.warning("store_away" if away else "store_back", reason=away.message if away else None)
        if not away:
            self._ledger.renew_all(now())
        for listener in self.listeners:
            await listener(not self._is_away)
