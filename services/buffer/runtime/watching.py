"""Streams the history from any position, then live. Each watcher reads at its own pace and delays nobody.

Live watchers are served from memory. One that falls behind by more than `max_lag` events is cut off with the position
at which it may go on: the ledger keeps no queue for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace.errors import DataLoss, OutOfRange
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.transaction import LedgerEvent
from services.buffer.runtime.journal import Journal
from services.buffer.store.base import Store

_EVENTS_PER_PAGE = 500
_READERS = 2


class Watching:
    def __init__(self, journal: Journal, store: Store, max_lag: int) -> None:
        self._journal = journal
        self._store = store
        self._max_lag = max_lag
        self._readers = BlockingPool("history", _READERS)

    async def watch(self, from_position: int) -> AsyncIterator[list[LedgerEvent]]:
        """Yields events; position 0 is the oldest stored. Raises OutOfRange outside of the history or when too slow."""
        position = from_position or self._journal.oldest_position
        self._require_kept(position)
        if position > self._journal.durable_position + 1:
            raise OutOfRange(
                f"position {position} is not written yet: the latest is {self._journal.durable_position}",
                latest_position=str(self._journal.durable_position),
            )
        is_live = False
        while True:
            ticket = self._journal.advanced.ticket()
            lag = self._journal.durable_position + 1 - position
            if is_live and lag > self._max_lag:
                raise OutOfRange(
                    f"this watcher is {lag} events behind, more than {self._max_lag}: "
                    f"read faster, and watch again from position {position}",
                    position=str(position),
                )
            if lag == 0:
                is_live = True
                await ticket.wait()
                continue
            events = self._journal.tail.read(position, _EVENTS_PER_PAGE)
            if events is None:
                events = await self._readers.run(self._store.read_events, position, _EVENTS_PER_PAGE)
            events = events[: _num_without_gap(events, position)]
            if not events:
                await self._refuse_gap(position)
            position = events[-1].position + 1
            yield events
            del events  # not kept while the next is waited for

    async def _refuse_gap(self, position: int) -> None:
        """Raises OutOfRange when the position was deleted, DataLoss when its event is missing."""
        self._require_kept(position)
        behind = await self._readers.run(self._store.read_events, position, 1)
        following = behind[0].position if behind else self._journal.durable_position + 1
        raise DataLoss(
            f"the history has lost its events {position} to {following - 1}: watch from position {following}",
            next_position=str(following),
        )

    def _require_kept(self, position: int) -> None:
        oldest = self._journal.oldest_position
        if position < oldest:
            raise OutOfRange(
                f"events before position {oldest} are deleted (retain_events), {position} is one of them: "
                f"watch from {oldest}, or from 0",
                oldest_position=str(oldest),
            )


def _num_without_gap(events: Sequence[LedgerEvent], position: int) -> int:
    if events and events[-1].position == position + len(events) - 1:
        return len(events)
    return next((i for i, event in enumerate(events) if event.position != position + i), len(events))
