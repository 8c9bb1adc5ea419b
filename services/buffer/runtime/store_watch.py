"""Tells clients and operators while the store is away, and goes on when it is back.

Answering → away: its database is away (callers get UNAVAILABLE), or its disk is full (RESOURCE_EXHAUSTED). No lease
expires, and health is NOT_SERVING.
Away → answering: everything in memory is durable by then, and every lease starts its full time again.
A store that gives up ends the process, through the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.rpc.log import log
from services.buffer.runtime.journal import Journal
from services.buffer.store.base import Store

_LOOK_SECONDS = 0.25


class StoreWatch:
    """`listeners` are told each time that the store goes away or comes back."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self.listeners: list[Callable[[bool], Awaitable[None]]] = []
        self._store = store
        self._journal = journal
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def require(self) -> None:
        """Raises while the store is away. Call it before a command changes memory."""
        if away := self._store.waiting_for:
            raise away

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)  # the store waits in another thread, and has no event to set
            away = self._store.waiting_for
            if away:
                self._journal.refuse(away)
            if bool(away) != self._is_away:
                self._is_away = bool(away)
                log.warning("store_away" if away else "store_back", reason=away.message if away else None)
                for listener in self.listeners:
                    await listener(not self._is_away)
