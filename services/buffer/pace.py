"""Long work on the event loop is done in short parts, so that other work runs in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

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
