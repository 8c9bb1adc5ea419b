"""Retrying with a deadline: the one loop behind every client's patience.

A server's RetryInfo is obeyed; without one the pause grows from a tenth of a second to two seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.errors import DeadlineExceeded, DiskFull, HeadraceError, RetryableError, Unavailable

T = TypeVar("T")

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 2.0


def is_away(error: HeadraceError) -> bool:
    """True where the server is being restarted, or waits for its disk or its database."""
    return isinstance(error, Unavailable | DiskFull)


async def retry_until(
    end: float, attempt: Callable[[float], Awaitable[T]], may_help: Callable[[HeadraceError], bool] = is_away
) -> T:
    """`attempt(seconds left)`, repeated until it succeeds or `time.monotonic()` reaches `end`.

    Raises at once an error that a retry cannot help. At the end it raises the attempts' last error; an expired
    deadline is raised only when nothing else went wrong, because any other error says more about the cause.
    """
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    cause: HeadraceError | None = None
    while cause is None or time.monotonic() < end:
        try:
            return await attempt(max(end - time.monotonic(), 0.0))
        except HeadraceError as error:
            if cause is None or not isinstance(error, DeadlineExceeded):
                cause = error
            if not may_help(error):
                break
            pause = pause_seconds(error, backoff_seconds)
        await asyncio.sleep(min(pause, max(end - time.monotonic(), 0.0)))
        backoff_seconds = min(backoff_seconds * 2, _LONGEST_BACKOFF_SECONDS)
    raise cause


def pause_seconds(error: HeadraceError, backoff_seconds: float) -> float:
    """The longer of backoff and the server's request.

    Each has a random part, so that callers do not return all at once.
    """
    asked_seconds = error.retry_after_seconds if isinstance(error, RetryableError) else 0.0
    return max(backoff_seconds * random.uniform(0.5, 1.0), asked_seconds * random.uniform(1.0, 1.25))
