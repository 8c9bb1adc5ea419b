"""Tells clients and operators while the store is away, and goes on when it is back.

Answering → away (it waits for its database: callers hear UNAVAILABLE; or for room on its disk: RESOURCE_EXHAUSTED):
no lease ends, health says NOT_SERVING
→ answering: what memory has is durable by then, and every lease gets its full time again.
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
    """Runs from `start` to `stop`; `listeners` hear of every change whether the store answers."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self.listeners: list[Callable[[bool], Awaitable[None]]] = []
        self._store = store
        self._journal = journal
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks from now on."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Looks no more."""
        if self._task:
            self._task.cancel()

    def require(self) -> None:
        """Raises while the store is away: before a command changes memory."""
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
