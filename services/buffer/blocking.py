"""What keeps the event loop free: threads for work that blocks, and long work in short parts.

Each kind (prompt files, payloads, hashing, …) has a pool of its own, so that a file that never answers takes the
threads of its kind and no others. Threads are daemons: Python waits for those of an executor when it ends, and a read
from a file system that hangs would keep the process for as long.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Work = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class BlockingPool:
    """A pool of at most `num_threads` threads; each starts when it is first needed."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._most = num_threads
        self._threads: list[threading.Thread] = []
        self._waiting: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._num_busy = 0

    async def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Returns or raises what the function does. If the caller is cancelled, the function still runs to its end."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()
        self._num_busy += 1
        if self._num_busy > len(self._threads) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._waiting.put((loop, result, function, args))
        return await result

    def _serve(self) -> None:
        while True:
            loop, result, function, args = self._waiting.get()
            value, error = None, None
            try:
                value = function(*args)
            except BaseException as raised:  # noqa: BLE001  # whatever it is, it is the caller's
                error = raised
            try:
                loop.call_soon_threadsafe(self._done, result, value, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del result, function, args, value, error

    def _done(self, result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self._num_busy -= 1
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)


_Item = TypeVar("_Item")
_PIECE_SECONDS = 0.005


async def paced(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yields the items, and lets other work on the loop run whenever a few milliseconds have passed."""
    began = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began > _PIECE_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
