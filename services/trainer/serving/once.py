"""Work that is done once for each key, for everybody who asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A caller that goes away leaves the work to the others. A failure is not kept: the key can be asked for again."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._tasks: dict[str, asyncio.Task[T]] = {}

    async def get(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of the first `work` that was given with the key and did not fail. The last `keep` are known."""
        if key not in self._tasks:
            task = asyncio.ensure_future(_awaited(work))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._finished(key, done))
        return await asyncio.shield(self._tasks[key])

    def discard(self, key: str) -> None:
        """A result that no longer holds; work that is not finished goes on."""
        if key in self._tasks and self._tasks[key].done():
            del self._tasks[key]

    def _finished(self, key: str, task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._tasks[key]
            return
        done = [each for each, known in self._tasks.items() if known.done()]
        for oldest in done[: -self._keep]:
            del self._tasks[oldest]


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
