"""Long work on the event loop, in short pieces: others have their turn in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_PIECE_SECONDS = 0.005


async def paced(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """The items; whoever works on them for a while lets the others on the loop go first."""
    began = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began > _PIECE_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
