"""The table of which agent host plays which task, without clock, wire or session.

A task is waiting → lent → done. A lease that is not renewed ends, and its task is waiting again, in front; one that
has been lost so often, or played longer than it may be, is given up. Nothing is durable: with the service its tasks
end, and the ledger's leases bring their prompts again.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_LOSSES = 3
"""A task that this number of hosts took and did not finish has failed: it may be what ends them."""


@dataclass(eq=False, slots=True)
class TaskOffer:
    """A task to play; `seconds` is how long one host may play it, `num_bytes` its size on the wire."""

    seconds: float
    num_bytes: int
    since: float
    losses: list[str] = field(default_factory=list)
    """The hosts that lost it."""
    lease_id: str | None = None
    """The lease of the host that plays it now."""


@dataclass(frozen=True, slots=True)
class TaskLease:
    """One host plays one task."""

    lease_id: str
    offer: TaskOffer
    host_id: str
    began: float


class TaskLeases:
    """Tasks that wait, in order, and leases. `now` is in seconds of any clock that does not go back."""

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.waiting: OrderedDict[TaskOffer, None] = OrderedDict()
        self._leases: dict[str, TaskLease] = {}
        self._renewed: dict[str, float] = {}

    def offer(self, offer: TaskOffer) -> None:
        """The task waits behind all others."""
        self.waiting[offer] = None

    def withdraw(self, offer: TaskOffer) -> None:
        """Nobody wants the task any more; does nothing for one that is done."""
        self.waiting.pop(offer, None)
        if offer.lease_id is not None:
            self._end(self._leases[offer.lease_id])

    def lend(self, host_id: str, most: int, most_bytes: int, now: float) -> list[TaskLease]:
        """Returns at most `most` leases; a task that is larger than all of `most_bytes` comes alone."""
        leases, left = list[TaskLease](), most_bytes
        while self.waiting and len(leases) < most and (not leases or next(iter(self.waiting)).num_bytes <= left):
            offer, _ = self.waiting.popitem(last=False)
            left -= offer.num_bytes
            offer.lease_id = secrets.token_urlsafe(12)
            lease = TaskLease(offer.lease_id, offer, host_id, now)
            self._leases[lease.lease_id], self._renewed[lease.lease_id] = lease, now
            leases.append(lease)
        return leases

    def renew(self, lease_ids: Sequence[str], now: float) -> list[str]:
        """Returns those that have ended."""
        self._renewed.update((each, now) for each in lease_ids if each in self._leases)
        return [each for each in lease_ids if each not in self._leases]

    def finish(self, lease_id: str) -> TaskOffer | None:
        """Ends the lease and returns its task, which is the caller's; None where it had ended."""
        lease = self._leases.get(lease_id)
        return self._end(lease) if lease else None

    def give_back(self, lease_id: str) -> TaskOffer | None:
        """The task waits again, in front of all others; None where the lease had ended."""
        offer = self.finish(lease_id)
        if offer:
            self._first(offer)
        return offer

    def lost(self, now: float) -> Iterator[TaskLease]:
        """Ends leases that were not renewed; their tasks wait again, but for those that were lost too often."""
        for lease in [each for each in self._leases.values() if self._is_lost(each, now)]:
            self._end(lease)
            lease.offer.losses.append(lease.host_id)
            if not self.is_hopeless(lease.offer):
                self._first(lease.offer)
            yield lease

    def overdue(self, now: float) -> Iterator[TaskLease]:
        """Ends leases of tasks that were played longer than they may be."""
        for lease in [each for each in self._leases.values() if now - each.began > each.offer.seconds]:
            self._end(lease)
            yield lease

    @staticmethod
    def is_hopeless(offer: TaskOffer) -> bool:
        return len(offer.losses) >= MAX_LOSSES

    def _is_lost(self, lease: TaskLease, now: float) -> bool:
        return now - self._renewed[lease.lease_id] > self.lease_seconds

    def _first(self, offer: TaskOffer) -> None:
        self.waiting[offer] = None
        self.waiting.move_to_end(offer, last=False)

    def _end(self, lease: TaskLease) -> TaskOffer:
        lease.offer.lease_id = None
        del self._leases[lease.lease_id], self._renewed[lease.lease_id]
        return lease.offer
