"""Many local waiters, few calls that wait at the server.

A call that waits costs the server some 24 KB. Callers that wait for the same thing therefore queue here, in the order
in which they came: the first few each have a call that waits at the server, and who is answered lets the next one ask.
Nothing is missed, because there is nothing for anybody in the queue as long as the calls at its head wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

from headrace.errors import DeadlineExceeded

_Answer = TypeVar("_Answer")

WAITING_AT_ONCE = 8
"""The number of calls that wait for one thing: when much arrives at once, a round trip serves that many."""
LOOKING_AT_ONCE = 64
"""Calls that do not wait, of those whose time ended in the queue."""

Ask = Callable[[float, float], Awaitable[_Answer]]
"""(seconds to wait at the server, seconds until the call's deadline)."""


class SharedWaits:
    """The queues of one client. Each caller asks by itself, with its own request, and gets its own answer or error."""

    def __init__(self) -> None:
        self._queues: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._looks = asyncio.Semaphore(LOOKING_AT_ONCE)

    async def ask(self, awaited: Hashable, ask: Ask[_Answer], wait_seconds: float, deadline_seconds: float) -> _Answer:
        """Asks when it is this caller's turn, at the latest after `wait_seconds`, and then without a wait.

        Callers of equal `awaited` must be such that the server lets one of them go on exactly when it would let any.
        """
        if not 0 < wait_seconds < math.inf:
            return await ask(wait_seconds, deadline_seconds)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_seconds
        queue = self._queues.setdefault(awaited, asyncio.Semaphore(WAITING_AT_ONCE))
        if not await _acquired(queue, end):
            return await self._look(ask, end + deadline_seconds)
        try:
            return await ask(max(end - loop.time(), 0.0), deadline_seconds)
        finally:
            queue.release()

    async def _look(self, ask: Ask[_Answer], end: float) -> _Answer:
        """Asks without a wait; many waits may end in the same moment."""
        if not await _acquired(self._looks, end):
            raise DeadlineExceeded(
                f"{LOOKING_AT_ONCE} calls of this client before this one got no answer until its deadline: "
                "check that the server runs"
            )
        try:
            return await ask(0.0, max(end - asyncio.get_running_loop().time(), 0.0))
        finally:
            self._looks.release()


async def _acquired(semaphore: asyncio.Semaphore, end: float) -> bool:
    """Returns False when it was not this caller's turn before the loop's time `end`."""
    try:
        async with asyncio.timeout_at(end):
            return await semaphore.acquire()
    except TimeoutError:
        return False
