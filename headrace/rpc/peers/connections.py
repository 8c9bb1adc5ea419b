"""Limits the connections that one address may have to a gRPC port. gRPC itself accepts them all.

A connection is silent → known. It is known once a call on it was allowed. Where an address has too many, silent ones
are closed first, the longest silent before the others: a client that means to call has called by then. Without silent
ones the newest are closed, so that nobody loses what it has to a stranger.
"""

from __future__ import annotations

import math
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from headrace.limits import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER
from headrace.rpc.log import log
from headrace.rpc.peers import sockets
from headrace.rpc.peers.sockets import Connection

_CHECK_SECONDS = 0.25
_MOST_SECONDS_BETWEEN_LOOKS = 5.0
_FEW = 256
"""With fewer descriptors than this nobody is near a limit, and a check costs one system call."""
_NEW_PER_LOOK = 64
_MOST_DESCRIPTORS = 1 << 16


@dataclass(frozen=True, slots=True)
class Seen:
    """A connection, when it was seen first, and whether a call on it was allowed."""

    connection: Connection
    since: float
    is_known: bool


def surplus(seen: Iterable[Seen], most_per_peer: int, most: int) -> Sequence[Connection]:
    """Returns those to close."""
    by_host: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        by_host[each.connection.host].append(each)
    closed, left = list[Connection](), list[Seen]()
    for of_host in by_host.values():
        ordered = sorted(of_host, key=_order)
        num_closed = max(0, len(ordered) - most_per_peer)
        closed += [each.connection for each in ordered[:num_closed]]
        left += ordered[num_closed:]
    left.sort(key=_order)
    return [*closed, *(each.connection for each in left[: max(0, len(left) - most)])]


def _order(each: Seen) -> tuple[bool, float]:
    return each.is_known, -each.since if each.is_known else each.since


class Pace:
    """Says when a look is due. It asks about each descriptor: where they are many, it waits until some are new."""

    def __init__(self, most_per_peer: int) -> None:
        self._few = min(_FEW, most_per_peer)
        self._new = min(_NEW_PER_LOOK, max(1, most_per_peer // 8))
        self._least_open = 0
        self._looked = -math.inf

    def is_due(self, num_open: int, now: float) -> bool:
        """Returns True when some address may have too many by now; then it counts as looked at."""
        self._least_open = min(self._least_open, num_open)
        is_new = num_open >= self._least_open + self._new
        if num_open < self._few or not (is_new or now >= self._looked + _MOST_SECONDS_BETWEEN_LOOKS):
            return False
        self._least_open, self._looked = num_open, now
        return True


class ConnectionGuard:
    """Looks at a port's connections from a thread of its own. States: built → started → stopped."""

    def __init__(self, most_per_peer: int = MAX_CONNECTIONS_PER_PEER, most: int = MAX_CONNECTIONS) -> None:
        self._most_per_peer = most_per_peer
        self._most = min(most, _raised_descriptors() // 2)
        self._port = 0
        self._known: set[str] = set()
        self._since: dict[str, float] = {}
        self._stopped = threading.Event()
        self._pace = Pace(most_per_peer)
        self.num_closed = 0

    def start(self, port: int) -> None:
        """`port` is the one that is listened on."""
        self._port = port
        threading.Thread(target=self._run, name="connections", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._stopped.set()

    def know(self, peer: str) -> None:
        """A call on this connection was allowed. `peer` is what gRPC's context says."""
        if peer not in self._known:
            self._known.add(peer)

    def _run(self) -> None:
        while not self._stopped.wait(_CHECK_SECONDS):
            try:
                if self._pace.is_due(max(sockets.num_descriptors(), len(self._known)), time.monotonic()):
                    self.look()
            except Exception as error:  # noqa: BLE001  # it goes on, whatever one look met
                log.error("connections_not_counted", exc_info=error)

    def look(self) -> None:
        """Closes what is too much."""
        known_now, now = self._known.copy(), time.monotonic()
        known = {unquote(peer) for peer in known_now}
        found = list(sockets.connections_to(self._port))
        self._since = {each.peer: self._since.get(each.peer, now) for each in found}
        self._known.difference_update({peer for peer in known_now if unquote(peer) not in self._since})
        seen = (Seen(each, self._since[each.peer], each.peer in known) for each in found)
        closed = [each for each in surplus(seen, self._most_per_peer, self._most) if sockets.end(each, self._port)]
        if closed:
            self.num_closed += len(closed)
            hosts = sorted({each.host for each in closed})
            log.warning("connections_closed", count=len(closed), hosts=hosts[:5], most_per_peer=self._most_per_peer)


def _raised_descriptors() -> int:
    """Raises this process's limit of open files as far as it may, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
