"""The shares of the engines: slots for each kind of request, lent to others while they are free.

A kind may always use its own slots. Beyond them it borrows, as long as not all slots of all kinds are in use. What is
lent is not taken back before its request ends, so all kinds together may for a while have more in use than there are
slots: less than twice as many. Nobody waits while a slot is free, and a kind that waits has its own slots in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a request."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    CLIENTS = "clients"
    """Generate, and the OpenAI endpoint without a session."""


class Shares:
    """Counts requests in use and waiting. A kind alone may have `alone` in use, where all slots are fewer."""

    def __init__(self, slots: Mapping[Kind, int], *, alone: int = 0) -> None:
        self._slots = dict(slots)
        self._alone = alone
        self._in_use = dict.fromkeys(Kind, 0)
        self._waiting = dict.fromkeys(Kind, 0)

    def slots(self, kind: Kind) -> int:
        """Returns the kind's own slots."""
        return self._slots.get(kind, 0)

    def in_use(self, kind: Kind) -> int:
        """Returns the requests of the kind that are at the engines."""
        return self._in_use[kind]

    def waiting(self, kind: Kind) -> int:
        """Returns the requests of the kind that wait."""
        return self._waiting[kind]

    def resize(self, kind: Kind, slots: int) -> None:
        """Changes a kind's own slots; what is in use stays."""
        self._slots[kind] = slots

    def take(self, kind: Kind, count: int = 1) -> None:
        """Counts requests that begin without waiting."""
        self._in_use[kind] += count

    def free(self, kind: Kind, count: int = 1) -> None:
        """Counts requests that ended."""
        self._in_use[kind] -= count

    def wait(self, kind: Kind) -> None:
        """Counts a request that waits for `next`."""
        self._waiting[kind] += 1

    def give_up(self, kind: Kind) -> None:
        """Counts a request that waits no more."""
        self._waiting[kind] -= 1

    def next(self) -> Kind | None:
        """Begins the next waiting request and returns its kind; None while none may begin.

        Kinds with own slots left come first, then the one that has least in use for its slots.
        """
        able = [kind for kind in Kind if self._waiting[kind] and self._room(kind) > 0]
        if not able:
            return None
        chosen = min(able, key=lambda kind: (self._own_room(kind) <= 0, self._in_use[kind] / max(1, self.slots(kind))))
        self._waiting[chosen] -= 1
        self._in_use[chosen] += 1
        return chosen

    def room(self, kind: Kind) -> int:
        """Returns how many more requests of the kind could begin now, if no others came."""
        return max(self._room(kind) - self._waiting[kind], 0)

    def _room(self, kind: Kind) -> int:
        total = sum(self._slots.values())
        if not any(self._in_use[other] or self._waiting[other] for other in Kind if other is not kind):
            total = max(total, self._alone)
        return max(self._own_room(kind), total - sum(self._in_use.values()))

    def _own_room(self, kind: Kind) -> int:
        return self.slots(kind) - self._in_use[kind]
