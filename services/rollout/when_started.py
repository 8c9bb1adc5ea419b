"""Calls to a service that still starts its engines wait for it; who only looks is answered at once.

So a restart is a wait for callers, however long engines load, and not a port where nobody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

AT_ONCE = frozenset({"GetFleet"})


class WhenStarted:
    """Has the methods of `servicer`."""

    def __init__(self, servicer: Any, started: asyncio.Event) -> None:
        self._servicer = servicer
        self._started = started

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._servicer, name)
        if name in AT_ONCE:
            return method
        return self._stream(method) if inspect.isasyncgenfunction(method) else self._unary(method)

    def _unary(self, method: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await self._started.wait()
            return await method(request, context)

        return call

    def _stream(self, method: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._started.wait()
            async with contextlib.aclosing(method(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return call
