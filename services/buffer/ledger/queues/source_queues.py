"""A stream's groups by prompt source, in the order of weighted fair queueing.

Of several files every one has a queue, a ready pool and a cursor. The next group is of the source whose share is
furthest behind: the smallest (outstanding groups + 1) / weight, the first of equals. Producers get the next groups, and
a batch is made, in this order. Outstanding are, for a lease, the groups given to batches, READY and LEASED; for a batch
those given to batches. A group that is dropped or fails is no longer outstanding, so the next lease is of its source,
and a batch that waits for one source waits for groups that are leased.

A source at its end leaves its share to the others. What was submitted comes before all sources and counts for none;
where there are not several files everything is in that queue.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from services.buffer.ledger.group import Group
from services.buffer.ledger.queues.prompt_queue import PromptQueue
from services.buffer.ledger.queues.ready_pool import ReadyPool
from services.buffer.ledger.stream import StreamConfig, StreamState

_SUBMITTED = None


class SourceQueues:
    """QUEUED groups and READY ones without a batch; ids only, `IndexedStream` has the groups."""

    def __init__(self, config: StreamConfig) -> None:
        self._weights = [file.weight for file in config.files] if len(config.files) > 1 else []
        names = (_SUBMITTED, *range(len(self._weights)))
        self._queues = {name: PromptQueue(config.selection) for name in names}
        self._pools = {name: ReadyPool(config.selection) for name in names}
        self._leased: Counter[int | None] = Counter()

    @property
    def num_queued(self) -> int:
        """Counts the groups that wait for a producer."""
        return sum(map(len, self._queues.values()))

    @property
    def num_ready(self) -> int:
        """Counts the READY groups in no batch."""
        return sum(map(len, self._pools.values()))

    def counts(self, source: int) -> tuple[int, int, int]:
        """Returns the numbers of (queued, leased, ready) groups of one of several files."""
        return len(self._queues[source]), self._leased[source], len(self._pools[source])

    def enqueue(self, group: Group) -> None:
        """Adds a QUEUED group."""
        self._queues[self._source(group)].add(group)

    def discard_queued(self, group: Group) -> None:
        """Removes a QUEUED group that is dropped."""
        self._queues[self._source(group)].discard(group.group_id)

    def lease(self, group: Group) -> None:
        """Counts a group that became LEASED."""
        self._leased[self._source(group)] += 1

    def unlease(self, group: Group) -> None:
        """Counts a group that is no longer LEASED."""
        self._leased[self._source(group)] -= 1

    def add_ready(self, group: Group) -> None:
        """Adds a READY group that is in no batch."""
        self._pools[self._source(group)].add(group)

    def discard_ready(self, group_id: str) -> None:
        """Removes the group if it is in the pool."""
        for pool in self._pools.values():
            pool.discard(group_id)

    def is_ready(self, group_id: str) -> bool:
        """True for a READY group in no batch."""
        return any(group_id in pool for pool in self._pools.values())

    def by_admission(self) -> list[str]:
        """Returns all READY ids, in the order of each source's admission."""
        return [group_id for pool in self._pools.values() for group_id in pool.by_admission()]

    def older_than(self, version: int, most: int) -> list[str]:
        """Removes and returns at most `most` READY ids whose oldest token is older than `version`."""
        taken: list[str] = []
        for pool in self._pools.values():
            taken += pool.older_than(version, most - len(taken))
        return taken

    def wanted(self, state: StreamState, count: int, room: int) -> tuple[int, ...]:
        """Returns how many prompts to read from each source (`room` in all) before the next `count` leases."""
        left = max(count - len(self._queues[_SUBMITTED]), 0)
        if not self._weights:
            return (min(left, room),)
        queued = [len(self._queues[i]) for i in range(len(self._weights))]
        seen: Counter[int] = Counter()
        missing: list[int] = []
        for source in self._lease_order(state, left):
            seen[source] += 1
            if seen[source] > queued[source]:
                missing.append(source)
        wanted = Counter(missing[:room])
        return tuple(wanted[i] for i in range(len(self._weights)))

    def take_queued(self, state: StreamState, count: int) -> list[str]:
        """Removes and returns up to `count` queued ids; fewer when the next source's prompts were not read yet."""
        taken = self._queues[_SUBMITTED].take(count)
        for source in self._lease_order(state, count - len(taken)):
            if not self._queues[source]:
                break
            taken += self._queues[source].take(1)
        return taken

    def take_batch(self, state: StreamState, count: int) -> list[str]:
        """Removes and returns a batch's ids; none if the source that comes next lacks groups. `count` must be READY."""
        submitted = min(len(self._pools[_SUBMITTED]), count)
        order = self._batch_order(state, count - submitted)
        shares = Counter(order)
        if len(order) < count - submitted or any(len(self._pools[i]) < share for i, share in shares.items()):
            return []
        chosen = {source: iter(self._pools[source].first(share)) for source, share in shares.items()}
        return [*self._pools[_SUBMITTED].first(submitted), *(next(chosen[source]) for source in order)]

    def _source(self, group: Group) -> int | None:
        return group.source if self._weights else _SUBMITTED

    def _lease_order(self, state: StreamState, count: int) -> list[int]:
        sources = range(len(self._weights))
        outstanding = [state.taken_of(i) + self._leased[i] + len(self._pools[i]) for i in sources]
        room = [len(self._queues[i]) if state.has_ended(i) else count for i in sources]
        return fair_order(self._weights, outstanding, room, count)

    def _batch_order(self, state: StreamState, count: int) -> list[int]:
        sources = range(len(self._weights))
        room = [self._leased[i] + len(self._pools[i]) if state.has_ended(i) else count for i in sources]
        return fair_order(self._weights, [state.taken_of(i) for i in sources], room, count)


def fair_order(weights: Sequence[float], outstanding: Sequence[int], room: Sequence[int], count: int) -> list[int]:
    """Returns the sources of the next `count` groups. A source gets at most its `room`, so there may be fewer."""
    heap = [((outstanding[i] + 1) / weight, i, 1) for i, weight in enumerate(weights) if room[i]]
    heapq.heapify(heap)
    found: list[int] = []
    while heap and len(found) < count:
        _, i, nth = heap[0]
        found.append(i)
        if nth < room[i]:
            heapq.heapreplace(heap, ((outstanding[i] + nth + 1) / weights[i], i, nth + 1))
        else:
            heapq.heappop(heap)
    return found
