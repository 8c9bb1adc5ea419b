"""Reads the time for those parts of the buffer that need it, and ends leases at their deadline."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from headrace.errors import Unavailable
from headrace.rpc.log import log
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.transaction import Instant
from services.buffer.runtime.journal import Changes, Signal, wait_for


def now() -> Instant:
    return Instant(time.monotonic(), time.time())


# Ends leases at their deadline. Unblocked by: the earliest deadline, a new lease, each second while there are leases.
# A buffer that did not run for some seconds (it was stopped, or its machine was) could not be told that a producer is
# alive: every lease starts its full time again.

_PULSE_SECONDS = 1.0
_STOPPED_SECONDS = 2.0
"""A pulse that comes later than this was kept from coming."""


class LeaseTimer:
    """Runs from `start` to `stop`."""

    def __init__(self, ledger: Ledger, changes: Changes) -> None:
        self._ledger = ledger
        self._changes = changes
        self._granted = Signal()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Leases expire from now on."""
        self._task = asyncio.create_task(self._run())

    def granted(self) -> None:
        """Looks at the earliest deadline again."""
        self._granted.set()

    def stop(self) -> None:
        """No lease expires any more."""
        if self._task:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            ticket = self._granted.ticket()
            result = self._ledger.expire_leases(now())
            if result[0]:
                with suppress(Unavailable):  # the store is away: they have ended, and it will hear of it
                    await self._changes.commit(result)
                log.info("leases_expired", num_groups=result[0])
            deadline = self._ledger.next_lease_deadline()
            if deadline is None:
                await ticket.wait()
            else:
                await self._pulse(ticket, deadline)

    async def _pulse(self, ticket: asyncio.Event, deadline: float) -> None:
        """Waits for the deadline, a second at most. Renews all leases if it could not wake up in time."""
        began = time.monotonic()
        seconds = min(max(deadline - began, 0.0), _PULSE_SECONDS)
        await wait_for(ticket, seconds)
        late_seconds = time.monotonic() - began - seconds
        if late_seconds > _STOPPED_SECONDS:
            log.warning("buffer_was_stopped", seconds=round(late_seconds, 1))
            self._ledger.renew_all(now())
