"""The connections of an HTTP port, by address, and the choice of those that are closed for others.

A connection is silent → speaking → silent …: silent until the whole head of a request has come, and again after its
answer. Of too many silent ones the oldest are closed: who means to ask has asked by then. A connection beyond the
others' number is refused only where all of them speak.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from headrace.limits import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER, MAX_SILENT_CONNECTIONS_PER_PEER


class Visit(Protocol):
    """One connection of a port."""

    host: str

    def close(self) -> None:
        """Ends the connection at once; it leaves the table by itself."""


class Visits:
    """The table. Dictionaries keep the order in which their connections became silent."""

    def __init__(
        self,
        most: int = MAX_CONNECTIONS,
        most_per_peer: int = MAX_CONNECTIONS_PER_PEER,
        most_silent: int = MAX_SILENT_CONNECTIONS_PER_PEER,
    ) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._most_silent = most_silent
        self._silent: dict[Visit, None] = {}
        self._of_host: dict[str, dict[Visit, None]] = defaultdict(dict)
        self._silent_of_host: dict[str, dict[Visit, None]] = defaultdict(dict)
        self._num_open = 0
        self.num_closed = 0

    def __len__(self) -> int:
        return self._num_open

    def enter(self, visit: Visit) -> bool:
        """False where it is refused."""
        host, others = visit.host, self._of_host.get(visit.host, {})
        if len(self) >= self._most and not self._close_oldest(self._silent):
            return False
        if len(others) >= self._most_per_peer and not self._close_oldest(self._silent_of_host.get(host, {})):
            return False
        self._of_host[host][visit] = None
        self._num_open += 1
        self.silent(visit)
        return True

    def silent(self, visit: Visit) -> None:
        """It waits for the head of a request."""
        of_host = self._silent_of_host.get(visit.host, {})
        if visit in of_host or visit not in self._of_host.get(visit.host, {}):
            return
        if len(of_host) >= self._most_silent:
            self._close_oldest(of_host)
        self._silent_of_host[visit.host][visit] = self._silent[visit] = None

    def speaks(self, visit: Visit) -> None:
        """A request has come."""
        self._silent.pop(visit, None)
        _remove(self._silent_of_host, visit)

    def leave(self, visit: Visit) -> None:
        """It is closed. Repeated for one that has left, it does nothing."""
        self.speaks(visit)
        self._num_open -= _remove(self._of_host, visit)

    def close_all(self) -> None:
        """Closes all connections of a port that ends."""
        for visit in [visit for of_host in self._of_host.values() for visit in of_host]:
            visit.close()

    def _close_oldest(self, of: dict[Visit, None]) -> bool:
        oldest = next(iter(of), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.close()
        self.num_closed += 1
        return True


def _remove(table: dict[str, dict[Visit, None]], visit: Visit) -> bool:
    of_host = table.get(visit.host, {})
    if visit not in of_host:
        return False
    del of_host[visit]
    if not of_host:
        del table[visit.host]
    return True
