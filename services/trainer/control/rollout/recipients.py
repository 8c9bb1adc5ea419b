"""The rollout services of one publication are asked all at once, and left behind when they fail.

They do not depend on each other: each has its own group of engines. But the trainer sends a bucket to all of them
before the next one, so one that hangs is left once the others had their time and some more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, Fenced, HeadraceError

STRAGGLER_SECONDS = 10.0

T = TypeVar("T")


class Straggler(DeadlineExceeded):
    """The others were done long before; it may still come to its own end."""


class Recipients:
    """The services by number; `left` has those that failed, with the error."""

    def __init__(self, services: Mapping[int, RolloutClient]) -> None:
        self.remaining = dict(services)
        self.left: dict[int, HeadraceError] = {}

    async def each(
        self, ask: Callable[[int, RolloutClient], Awaitable[T]], *, is_slow_alike: bool = True
    ) -> dict[int, T]:
        """The answers of those that go on.

        Once the quickest is done, others have STRAGGLER_SECONDS, and where they are slow alike as long again as it had.
        Raises Fenced when one says so, and the last error when none remains.
        """
        calls = {number: asyncio.ensure_future(ask(number, client)) for number, client in self.remaining.items()}
        try:
            await _all_but_stragglers(list(calls.values()), is_slow_alike=is_slow_alike)
        finally:
            late = [call for call in calls.values() if not call.done()]
            for call in late:
                call.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for number, call in calls.items():
            if call.cancelled():
                self.leave(number, Straggler("it was not done when the other rollout services had long been"))
            elif isinstance(error := call.exception(), HeadraceError):
                self.leave(number, error)
        if fenced := next((error for error in self.left.values() if isinstance(error, Fenced)), None):
            raise fenced
        self.require_any()
        return {number: calls[number].result() for number in self.remaining}

    def leave(self, number: int, error: HeadraceError) -> None:
        """It does not take part any more."""
        if self.remaining.pop(number, None) is not None:
            self.left[number] = error

    def require_any(self) -> None:
        """Raises the error of the one that was left last when none remains."""
        if not self.remaining:
            raise list(self.left.values())[-1]


async def _all_but_stragglers(calls: list[asyncio.Future[T]], *, is_slow_alike: bool) -> None:
    started, end = time.monotonic(), None
    pending = set(calls)
    while pending:
        seconds = None if end is None else max(end - time.monotonic(), 0.0)
        done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        if end is None and any(not call.cancelled() and call.exception() is None for call in done):
            now = time.monotonic()
            end = now + STRAGGLER_SECONDS + (now - started if is_slow_alike else 0.0)
