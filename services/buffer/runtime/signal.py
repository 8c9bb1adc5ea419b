"""Wakes all who wait for a change, without polling."""

from __future__ import annotations

import asyncio


class Signal:
    """Take a `ticket` first, look second, wait third: a change between looking and waiting is not missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Returns an event that the next change sets."""
        return self._event

    def set(self) -> None:
        """Wakes all who have a ticket."""
        self._event.set()
        self._event = asyncio.Event()


async def wait_for(ticket: asyncio.Event, seconds: float) -> bool:
    """Returns True when the change came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await ticket.wait()
    except TimeoutError:
        return False
    return True
