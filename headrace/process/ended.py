"""Says to a person how a process ended.

The kernel ends a process with SIGKILL when memory runs out, and tells nobody else. So the parent of a process looks
now and then at how much it has, and the highest number of the last looks stands beside the signal. The very last says
little: of a tree that lost its largest process and has not ended yet, it is what is left.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.process.exit_codes import PEER_AWAY, PEER_LOST
from headrace.process.memory import resident_of_tree

LOOK_SECONDS = 5.0
"""How often a starter looks at the memory of what it has started."""
NUM_LOOKS = 6
"""Half a minute: a service that lost a process has ended by then."""

_OF_PEERS = {PEER_AWAY: " (a service that it needs does not answer)", PEER_LOST: " (other ranks are gone)"}
_KILLED = 128 + signal.SIGKILL
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def meaning(code: int, resident_bytes: int | None = None) -> str:
    """Describes an exit code, where 128 + n is signal n. `resident_bytes`: what the process had before it."""
    if code <= 128:
        return f"exit code {code}{_OF_PEERS.get(code, '')}"
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
        self._pid = pid
        self._looks: deque[int] = deque(maxlen=NUM_LOOKS)

    @property
    def most(self) -> int | None:
        """Bytes in the last half minute; None before the first look."""
        return max(self._looks, default=None)

    async def watch(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Returns when `wait` does."""
        ended = asyncio.ensure_future(wait())
        try:
            while not ended.done():
                if resident := await asyncio.to_thread(resident_of_tree, self._pid):
                    self._looks.append(resident)
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(ended), LOOK_SECONDS)
        finally:
            ended.cancel()
