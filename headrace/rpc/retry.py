"""Retrying with a deadline: the one loop behind every client's patience.

A server's RetryInfo is obeyed; without one the pause grows from a tenth of a second to two seconds.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.errors import DeadlineExceeded, DiskFull, HeadraceError, RetryableError, Unavailable

T = TypeVar("T")


class Backoff:
    """The pauses between attempts: each is twice as long as the last one, up to `longest_seconds`.

    Each has a random part, so that callers do not return all at once.
    """

    def __init__(self, first_seconds: float = 0.1, longest_seconds: float = 2.0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self.seconds = first_seconds
        """The next pause takes between half of this and all of it, unless a server asks for a longer one."""

    def reset(self) -> None:
        """Begins again with the first pause, after an attempt that succeeded."""
        self.seconds = self._first_seconds

    def next_seconds(self, error: HeadraceError | None = None, *, at_most: float = math.inf) -> float:
        """Returns the length of the next pause, and doubles the one after it.

        It is no shorter than the `error` asks for, and never longer than `at_most`, which may be below zero.
        """
        asked_seconds = error.retry_after_seconds if isinstance(error, RetryableError) else 0.0
        pause_seconds = max(self.seconds * random.uniform(0.5, 1.0), asked_seconds * random.uniform(1.0, 1.25))
        self.seconds = min(self.seconds * 2, self._longest_seconds)
        return max(min(pause_seconds, at_most), 0.0)

    async def sleep(self, error: HeadraceError | None = None, *, at_most: float = math.inf) -> None:
        await asyncio.sleep(self.next_seconds(error, at_most=at_most))


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
    backoff = Backoff()
    cause: HeadraceError | None = None
    while cause is None or time.monotonic() < end:
        try:
            return await attempt(max(end - time.monotonic(), 0.0))
        except HeadraceError as error:
            if cause is None or not isinstance(error, DeadlineExceeded):
                cause = error
            if not may_help(error):
                break
            await backoff.sleep(error, at_most=end - time.monotonic())
    raise cause
