"""The latest durable events in memory: thousands of live watchers read them without a disk."""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.ledger.transaction import LedgerEvent

_KEPT = 4096


class Tail:
    """Holds at least the latest `_KEPT` events since the start of the process."""

    def __init__(self) -> None:
        self._events: list[LedgerEvent] = []

    def add(self, events: Sequence[LedgerEvent]) -> None:
        """Adds durable events, in order of position."""
        self._events += events
        if len(self._events) > 2 * _KEPT:
            del self._events[:-_KEPT]

    def read(self, from_position: int, count: int) -> list[LedgerEvent] | None:
        """Returns None when the events have to be read from the store."""
        if not self._events:
            return None
        skipped = from_position - self._events[0].position
        return self._events[skipped : skipped + count] if skipped >= 0 else None
