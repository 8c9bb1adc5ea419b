"""The calls that a server is answering, so that those it cannot finish get an answer when it ends.

gRPC would cancel them, and a client that sees CANCELLED does not know that it may ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from headrace.errors import Unavailable

_RETRY_SECONDS = 0.1


class CallsInProgress:
    """Each call is a task of gRPC's."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[object], str] = {}
        self._ended: set[asyncio.Task[object]] = set()
        self._ending: Collection[str] | None = ()

    @contextmanager
    def one(self, method: str) -> Iterator[None]:
        """Raises Unavailable inside of the block once `end` was called for the method."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_ending(method):
            raise _ending(method)
        self._methods[task] = method
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if task not in self._ended:
                raise
            task.uncancel()
            raise _ending(method) from cancelled
        finally:
            del self._methods[task]
            self._ended.discard(task)

    def end(self, methods: Collection[str] | None = None) -> None:
        """Ends the calls of these methods, or all, and those that come from now on."""
        self._ending = methods
        for task, method in self._methods.items():
            if self._is_ending(method):
                self._ended.add(task)
                task.cancel()

    def _is_ending(self, method: str) -> bool:
        return self._ending is None or method in self._ending


def _ending(method: str) -> Unavailable:
    return Unavailable(
        f"the server ends, and {method} with it: ask again, which waits until it is back",
        retry_after_seconds=_RETRY_SECONDS,
        reason="SERVER_ENDS",
    )
