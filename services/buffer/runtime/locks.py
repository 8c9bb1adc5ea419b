"""A lock for each name of a stream. One that nobody holds or waits for takes no memory."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class Locks:
    """`async with locks[name]`: callers keep names of streams that do not exist apart, too, without leaving a trace."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self._held.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._held)
