"""Live leases, their groups and their deadlines. Deadlines live in memory; a restart starts every lease again."""

from __future__ import annotations

from collections import defaultdict

from services.buffer.ledger.group import Group
from services.buffer.ledger.queues.heap import NameHeap

_FEW = 64


class LeaseTable:
    """Leases of all streams by id, by request and by deadline (seconds of a monotonic clock)."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._deadlines: dict[str, float] = {}
        self._requests: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._ends: NameHeap[float] = NameHeap()
        """Each renewal adds an entry. Obsolete ones are dropped once they are more than half."""

    def __len__(self) -> int:
        return len(self._groups)

    def grant(self, group: Group, deadline: float) -> None:
        """Adds the group's lease."""
        lease = group.live_lease
        self._groups[lease.lease_id] = group
        self._requests[group.stream, lease.request_id][lease.lease_id] = None
        self.renew(lease.lease_id, deadline)

    def renew(self, lease_id: str, deadline: float) -> None:
        """Moves the deadline of a live lease."""
        if self._deadlines.get(lease_id) == deadline:
            return
        self._deadlines[lease_id] = deadline
        self._ends.add(deadline, lease_id)
        if len(self._ends) > 2 * len(self._deadlines) + _FEW:
            self._ends.retain(lambda deadline, lease_id: self._deadlines.get(lease_id) == deadline)

    def live(self) -> list[Group]:
        """Returns the groups of all live leases."""
        return list(self._groups.values())

    def end(self, lease_id: str) -> None:
        """Removes a live lease."""
        group = self._groups.pop(lease_id)
        del self._deadlines[lease_id]
        request = (group.stream, group.live_lease.request_id)
        del self._requests[request][lease_id]
        if not self._requests[request]:
            del self._requests[request]

    def find(self, lease_id: str) -> Group | None:
        """Returns the group under a live lease, or None."""
        return self._groups.get(lease_id)

    def seconds_left(self, lease_id: str, now: float) -> float:
        """Returns the time until a live lease expires."""
        return max(self._deadlines[lease_id] - now, 0.0)

    def of_request(self, stream: str, request_id: str) -> list[Group]:
        """Returns the groups that a LeaseGroups request got, as far as their leases still live."""
        if (stream, request_id) not in self._requests:
            return []
        return [self._groups[lease_id] for lease_id in self._requests[stream, request_id]]

    def due(self, now: float, most: int) -> list[Group]:
        """Returns at most `most` groups whose leases have reached their deadline."""
        found: list[Group] = []
        while len(found) < most and (first := self._ends.first()) and first[0] <= now:
            deadline, lease_id = self._ends.pop()
            if self._deadlines.get(lease_id) == deadline:
                found.append(self._groups[lease_id])
        return found

    def next_deadline(self) -> float | None:
        """Returns a time before which `due` returns nothing; None without leases."""
        first = self._ends.first()
        return first[0] if first else None
