from __future__ import annotations

from services.buffer.ledger.transaction import LedgerEvent
from services.buffer.runtime.journal import EventCache


def test_the_latest_events_are_in_memory_and_older_ones_are_left_to_the_store() -> None:
    tail = EventCache()
    assert tail.read(1, 10) is None
    for first in range(1, 20_001, 100):
        tail.add([LedgerEvent(position, 0.0, "train", "leased") for position in range(first, first + 100)])
    assert tail.read(100, 10) is None
    assert [event.position for event in tail.read(19_990, 5) or ()] == list(range(19_990, 19_995))
    assert tail.read(20_001, 10) == []
    oldest = next(position for position in range(1, 20_001) if tail.read(position, 1))
    assert 4096 <= 20_001 - oldest <= 8192
