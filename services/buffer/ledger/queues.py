"""The order in which groups wait, are given away, expire and are listed. Ids only: `IndexedStream` has the groups."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.stream import Selection, StreamConfig, StreamState

_Key = TypeVar("_Key", int, float, tuple[int, int], tuple[float, int], tuple[int, float, int])
_FEW = 64


class NameQueue(Generic[_Key]):
    """Names by key, smallest first, at a cost that does not grow with how many wait.

    What comes in the order of its key, as nearly everything does, waits in a line; the rest in a heap beside it. A heap
    alone touches some hundred entries scattered over memory when one is taken out of a million.
    Entries of names that left, or have another key now, are skipped when they come up, and dropped once they are more
    than half: no call looks at all.
    """

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        """The current key of each name that waits."""
        self._line: deque[tuple[_Key, str]] = deque()
        self._heap: list[tuple[_Key, str]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def add(self, name: str, key: _Key) -> None:
        """Adds a name, or gives it another key."""
        if self.keys.get(name) == key:
            return
        self.keys[name] = key
        if not self._line or self._line[-1][0] <= key:
            self._line.append((key, name))
        else:
            heapq.heappush(self._heap, (key, name))
        if len(self._line) + len(self._heap) > 2 * len(self.keys) + _FEW:
            self._line = deque(sorted((key, name) for name, key in self.keys.items()))
            self._heap = []

    def discard(self, name: str) -> None:
        self.keys.pop(name, None)

    def first(self) -> tuple[_Key, str] | None:
        """Returns the smallest key with its name, and leaves them there."""
        while self._line or self._heap:
            entry = self._heap[0] if self._is_heap_first() else self._line[0]
            if self.keys.get(entry[1]) == entry[0]:
                return entry
            self._pop()
        return None

    def take(self, count: int) -> list[str]:
        """Removes and returns at most `count` names, the smallest first."""
        taken: list[str] = []
        while len(taken) < count and (self._line or self._heap):
            key, name = self._pop()
            if self.keys.get(name) == key:
                del self.keys[name]
                taken.append(name)
        return taken

    def sorted(self) -> list[str]:
        return sorted(self.keys, key=self.keys.__getitem__)

    def _pop(self) -> tuple[_Key, str]:
        return heapq.heappop(self._heap) if self._heap and self._is_heap_first() else self._line.popleft()

    def _is_heap_first(self) -> bool:
        return bool(self._heap) and (not self._line or self._heap[0] < self._line[0])


class LeaseTable:
    """Live leases of all streams by id, by request and by deadline (seconds of a monotonic clock).

    Deadlines live in memory; a restart starts every lease again.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._requests: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._deadlines: NameQueue[float] = NameQueue()

    def __len__(self) -> int:
        return len(self._groups)

    def grant(self, group: Group, deadline: float) -> None:
        lease = group.live_lease
        self._groups[lease.lease_id] = group
        self._requests[group.stream, lease.request_id][lease.lease_id] = None
        self._deadlines.add(lease.lease_id, deadline)

    def renew(self, lease_id: str, deadline: float) -> None:
        self._deadlines.add(lease_id, deadline)

    def live(self) -> list[Group]:
        return list(self._groups.values())

    def end(self, lease_id: str) -> None:
        group = self._groups.pop(lease_id)
        self._deadlines.discard(lease_id)
        request = (group.stream, group.live_lease.request_id)
        del self._requests[request][lease_id]
        if not self._requests[request]:
            del self._requests[request]

    def find(self, lease_id: str) -> Group | None:
        return self._groups.get(lease_id)

    def seconds_left(self, lease_id: str, now: float) -> float:
        return max(self._deadlines.keys[lease_id] - now, 0.0)

    def of_request(self, stream: str, request_id: str) -> list[Group]:
        """Returns the groups that a LeaseGroups request got, as far as their leases still live."""
        if (stream, request_id) not in self._requests:
            return []
        return [self._groups[lease_id] for lease_id in self._requests[stream, request_id]]

    def due(self, now: float, most: int) -> list[Group]:
        """Returns at most `most` groups whose leases have reached their deadline. The caller ends these leases."""
        found: list[Group] = []
        while len(found) < most and (first := self._deadlines.first()) and first[0] <= now:
            self._deadlines.discard(first[1])
            found.append(self._groups[first[1]])
        return found

    def is_due(self, now: float) -> bool:
        deadline = self.next_deadline()
        return deadline is not None and deadline <= now

    def next_deadline(self) -> float | None:
        """Returns the time at which the next lease expires; None without leases."""
        first = self._deadlines.first()
        return first[0] if first else None


class ChangeOrder:
    """Groups by their latest change, newest first, in every state; ListGroups pages through them.

    A list of (position, group_id) for each state; entries of groups that changed are skipped, then compacted.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._lists: dict[GroupState, list[tuple[int, str]]] = {state: [] for state in GroupState}
        self._stale: dict[GroupState, int] = dict.fromkeys(GroupState, 0)

    def left(self, state: GroupState) -> None:
        """Notes that a group has left `state`; obsolete entries are removed from the end, and all of them at half."""
        self._stale[state] += 1
        entries = self._lists[state]
        while entries and not self._is_current(entries[-1]):
            entries.pop()
            self._stale[state] -= 1
        if self._stale[state] > _FEW and self._stale[state] * 2 > len(entries):
            self._lists[state] = [entry for entry in entries if self._is_current(entry)]
            self._stale[state] = 0

    def entered(self, group: Group) -> None:
        """Adds a group at the end: its position is above all earlier ones."""
        self._lists[group.state].append((group.position, group.group_id))

    def before(self, position: int, states: Iterable[GroupState]) -> Iterator[Group]:
        """Yields the groups in `states` whose latest change is below `position`, newest first."""
        walks = (self._walk(state, position) for state in states)
        return (self._groups[group_id] for _, group_id in heapq.merge(*walks, reverse=True))

    def _walk(self, state: GroupState, position: int) -> Iterator[tuple[int, str]]:
        entries = self._lists[state]
        for i in range(bisect_left(entries, (position, "")) - 1, -1, -1):
            if self._is_current(entries[i]):
                yield entries[i]

    def _is_current(self, entry: tuple[int, str]) -> bool:
        group = self._groups.get(entry[1])
        return group is not None and group.position == entry[0]


class PromptQueue(NameQueue[tuple[int, int]]):
    """QUEUED groups in the order producers get them: by priority where asked, then by age.

    Groups leave by age, so one that comes back (a lost lease, a failure) is older than all that wait: it is at the
    front.
    """

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self._by_priority = selection is Selection.PRIORITY

    def enqueue(self, group: Group) -> None:
        self.add(group.group_id, (-group.prompt.priority if self._by_priority else 0, group.seq))


class ReadyPool:
    """READY groups that no batch has yet, in the order of the stream's selection, and by age for expiry.

    FIFO and LIFO go by admission, PRIORITY by the prompt's, FRESHEST by the oldest token's policy version, REWARD by
    the mean reward (highest first), SURPRISE by the mean |R - mean of the group|, the size of what GRPO learns from:
    groups of equal rewards come last. Ties, and groups without rewards, go by admission.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._chosen: NameQueue[tuple[float, int]] = NameQueue()
        self._oldest: NameQueue[tuple[int, float, int]] = NameQueue()

    def __len__(self) -> int:
        return len(self._chosen)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._chosen

    def add(self, group: Group) -> None:
        key = self._key(group)
        self._chosen.add(group.group_id, key)
        if group.oldest_version is not None:
            self._oldest.add(group.group_id, (group.oldest_version, *key))

    def discard(self, group_id: str) -> None:
        self._chosen.keys.pop(group_id, None)
        self._oldest.keys.pop(group_id, None)

    def by_admission(self) -> list[str]:
        """Returns all ids, in the order in which the user's function sees them."""
        return self._chosen.sorted()

    def first(self, count: int) -> list[str]:
        """Removes and returns the first `count` ids. There must be as many."""
        taken = self._chosen.take(count)
        for group_id in taken:
            self._oldest.keys.pop(group_id, None)
        return taken

    def older_than(self, version: int, most: int) -> list[str]:
        """Removes and returns at most `most` ids whose oldest token is older than `version`."""
        taken: list[str] = []
        while len(taken) < most and (first := self._oldest.first()) and first[0][0] < version:
            self.discard(first[1])
            taken.append(first[1])
        return taken

    def _key(self, group: Group) -> tuple[float, int]:
        match self._selection:
            case Selection.FIFO | Selection.HOOK:
                return 0, group.admitted_at
            case Selection.LIFO:
                return 0, -group.admitted_at
            case Selection.PRIORITY:
                return -group.prompt.priority, group.admitted_at
            case Selection.FRESHEST:
                return -(group.oldest_version or 0), group.admitted_at
            case Selection.REWARD:
                return -_mean(group.rewards, nothing=-math.inf), group.admitted_at
            case Selection.SURPRISE:
                mean = _mean(group.rewards, nothing=0.0)
                return -_mean([abs(reward - mean) for reward in group.rewards], nothing=0.0), group.admitted_at


def _mean(values: Sequence[float], *, nothing: float) -> float:
    return sum(values) / len(values) if values else nothing


_SUBMITTED = None


class SourceQueues:
    """A stream's QUEUED groups, and its READY ones without a batch, by prompt source: weighted fair queueing.

    Of several files every one has a queue, a ready pool and a cursor. The next group is of the source whose share is
    furthest behind: the smallest (outstanding groups + 1) / weight, the first of equals. Producers get the next groups,
    and a batch is made, in this order. Outstanding are, for a lease, the groups given to batches, READY and LEASED; for
    a batch those given to batches. A group that is dropped or fails is no longer outstanding, so the next lease is of
    its source, and a batch that waits for one source waits for groups that are leased.

    A source at its end leaves its share to the others. What was submitted comes before all sources and counts for none;
    where there are not several files everything is in that queue.
    """

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
        self._queues[self._source(group)].enqueue(group)

    def discard_queued(self, group: Group) -> None:
        """Removes a QUEUED group that no producer took."""
        self._queues[self._source(group)].discard(group.group_id)

    def lease(self, group: Group) -> None:
        self._leased[self._source(group)] += 1

    def unlease(self, group: Group) -> None:
        self._leased[self._source(group)] -= 1

    def add_ready(self, group: Group) -> None:
        self._pools[self._source(group)].add(group)

    def discard_ready(self, group_id: str) -> None:
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
