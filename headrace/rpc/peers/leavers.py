"""Notices that callers reset their calls as fast as they make them, and has further calls wait before they are read.

gRPC loses a block of 96 bytes for each call that is cancelled while its request is awaited (grpc/grpc #43360), and each
such block keeps a page. A call that was reset is over by itself within the wait, before anything was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

_MANY = 64
_SECONDS = 1.0
_WAIT_SECONDS = 0.02


class Leavers:
    """The times of the last calls of a server that ended before their requests had come."""

    def __init__(self) -> None:
        self._times = deque[float](maxlen=_MANY)

    def left(self) -> None:
        """A call ended before its request had come."""
        self._times.append(time.monotonic())

    @property
    def are_many(self) -> bool:
        """True while that happens many times a second."""
        return len(self._times) == _MANY and time.monotonic() - self._times[0] < _SECONDS

    async def outlast(self) -> None:
        """Delays a call that begins while many calls leave: one that was reset is cancelled here, which counts too."""
        await asyncio.sleep(_WAIT_SECONDS)
