"""How long an event loop was held at once: by a callback, a handler between two awaits, a long deserialization."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

_TICK_SECONDS = 0.002


class LoopWatchdog:
    """`async with LoopWatchdog() as watchdog: …; assert watchdog.held_seconds < 0.05`.

    It counts the processor time that the loop's thread used between two of its ticks, so a machine that is busy with
    others adds nothing; sleeping in a handler (a lock, a file that is a pipe) is in `stood_seconds`, by the clock.
    """

    def __init__(self) -> None:
        self.held_seconds = 0.0
        self.stood_seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatchdog:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.sleep(_TICK_SECONDS)  # what ran last is counted as well
        assert self._task
        self._task.cancel()

    def restart(self) -> None:
        """Forgets what it has seen."""
        self.held_seconds = self.stood_seconds = 0.0

    async def _tick(self) -> None:
        while True:
            used, started = time.thread_time(), time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            self.held_seconds = max(self.held_seconds, time.thread_time() - used)
            self.stood_seconds = max(self.stood_seconds, time.monotonic() - started - _TICK_SECONDS)
