"""Live leases: whose they are and when they end. Deadlines are in memory only: a restart renews all."""

from __future__ import annotations

from collections import defaultdict

from services.buffer.ledger.group import Group
from services.buffer.ledger.queues.ordered import Ordered


class LeaseTable:
    """Leases of all streams by id, by request and by deadline (seconds of a monotonic clock)."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._deadlines: dict[str, float] = {}
        self._requests: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._ends: Ordered[float] = Ordered()

    def __len__(self) -> int:
        return len(self._groups)

    def grant(self, group: Group, deadline: float) -> None:
        """The group is LEASED until the deadline."""
        assert group.lease is not None
        self._groups[group.lease.lease_id] = group
        self._requests[group.stream, group.lease.request_id][group.lease.lease_id] = None
        self.renew(group.lease.lease_id, deadline)

    def renew(self, lease_id: str, deadline: float) -> None:
        """A live lease ends later."""
        if self._deadlines.get(lease_id) == deadline:
            return
        self._deadlines[lease_id] = deadline
        self._ends.add(deadline, lease_id)

    def live(self) -> list[Group]:
        """The groups of all leases."""
        return list(self._groups.values())

    def end(self, lease_id: str) -> None:
        """The lease is over."""
        group = self._groups.pop(lease_id)
        del self._deadlines[lease_id]
        assert group.lease is not None
        request = (group.stream, group.lease.request_id)
        del self._requests[request][lease_id]
        if not self._requests[request]:
            del self._requests[request]

    def find(self, lease_id: str) -> Group | None:
        """The group under a live lease."""
        return self._groups.get(lease_id)

    def seconds_left(self, lease_id: str, now: float) -> float:
        """Until the deadline of a live lease."""
        return max(self._deadlines[lease_id] - now, 0.0)

    def of_request(self, stream: str, request_id: str) -> list[Group]:
        """What a LeaseGroups call was given and still lives."""
        if (stream, request_id) not in self._requests:
            return []
        return [self._groups[lease_id] for lease_id in self._requests[stream, request_id]]

    def due(self, now: float, most: int) -> list[Group]:
        """At most `most` groups whose leases have reached their deadline."""
        found: list[Group] = []
        while len(found) < most and (first := self._ends.first()) and first[0] <= now:
            deadline, lease_id = self._ends.pop()
            if self._deadlines.get(lease_id) == deadline:
                found.append(self._groups[lease_id])
        return found

    def next_deadline(self) -> float | None:
        """When `due` will next have something at the earliest."""
        first = self._ends.first()
        return first[0] if first else None
