"""Says to a person how a process ended.

The kernel ends a process with SIGKILL when memory runs out, and tells nobody else. So whoever starts a process looks
now and then at how much it has, and the last number stands beside the signal.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.process.memory import resident_of_tree

LOOK_SECONDS = 5.0
"""How often a starter looks at the memory of what it has started."""

_KILLED = 128 + signal.SIGKILL
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def meaning(code: int, resident_bytes: int | None = None) -> str:
    """Describes an exit code, where 128 + n is signal n. `resident_bytes`: what the process had when last looked at."""
    if code <= 128:
        return f"exit code {code}"
    if code != _KILLED:
        return f"signal {code - 128}"
    had = "" if resident_bytes is None else f" It had {in_words(resident_bytes)} resident"
    return f"signal 9 (killed: out of memory?{had})"


def in_words(num_bytes: float) -> str:
    """The bytes in the unit in which they have one to four digits."""
    unit = 0
    while num_bytes >= 1024 and unit + 1 < len(_UNITS):
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"


class ResidentMemory:
    """The memory of a process and those below it, looked at while it runs."""

    def __init__(self, pid: int) -> None:
        self.last: int | None = None
        """Bytes; None before the first look."""
        self._pid = pid

    async def watch(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Returns when `wait` does."""
        ended = asyncio.ensure_future(wait())
        try:
            while not ended.done():
                self.last = await asyncio.to_thread(resident_of_tree, self._pid) or self.last
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(ended), LOOK_SECONDS)
        finally:
            ended.cancel()
