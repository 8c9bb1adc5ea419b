"""Runs background work that must not end unnoticed: an exception is logged, counted, and the work is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from headrace.rpc.log import log
from headrace.rpc.retry import Backoff

_LONGEST_PAUSE_SECONDS = 30.0
_GOOD_SECONDS = 60.0
"""Work that went on for so long is started again without a long pause."""


async def kept_running(name: str, work: Callable[[], Awaitable[None]], ended: Callable[[str], None]) -> None:
    """Runs `work()` until it returns.

    After an exception `ended(name)` is called, and `work()` begins again after a pause that grows.
    """
    backoff = Backoff(longest_seconds=_LONGEST_PAUSE_SECONDS)
    while True:
        started = time.monotonic()
        try:
            return await work()
        except Exception as error:  # noqa: BLE001  # whatever it is: the service depends on this work and cannot tell that it is gone
            if time.monotonic() - started > _GOOD_SECONDS:
                backoff.reset()
            pause_seconds = backoff.next_seconds()
            log.error("background_work_ended", work=name, again_in_seconds=round(pause_seconds, 2), exc_info=error)
            ended(name)
        await asyncio.sleep(pause_seconds)
