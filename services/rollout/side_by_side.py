"""Several streams as one, in the order in which their parts come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")

_WAITING = 4
"""Parts of each stream that may wait for a slow reader."""


async def side_by_side(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Every part of every stream, once; raises the first error of one. Close it: the streams' work ends with it."""
    merged = _Merged[T](_WAITING * len(streams))
    reading = [asyncio.create_task(merged.read(stream)) for stream in streams]
    try:
        for _ in streams:
            while part := await merged.next():
                yield part[0]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class _Merged(Generic[T]):
    def __init__(self, size: int) -> None:
        self._parts = asyncio.Queue[tuple[T] | tuple[()] | Exception](size)

    async def read(self, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for part in stream:
                    await self._parts.put((part,))
        except Exception as error:  # noqa: BLE001  # it is raised to the reader
            await self._parts.put(error)
        else:
            await self._parts.put(())

    async def next(self) -> tuple[T] | tuple[()]:
        """Empty at the end of one of the streams."""
        part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        return part
