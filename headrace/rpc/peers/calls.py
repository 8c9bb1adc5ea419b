"""Limits what one peer may have of a server at once, so that a runaway client does not crowd out the others.

A call is receiving → answered → ended. Calls beyond those that may receive wait, and their requests stay unread: what
is on its way costs no more than a window of the wire.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import ResourceExhausted
from headrace.limits import MAX_BYTES_PER_PEER, MAX_RECEIVING_PER_PEER
from headrace.rpc.access.caller import Caller
from headrace.rpc.access.roles import Role

DEFAULT_MAX_CALLS = 40_000
_RETRY_SECONDS = 1.0
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")


def key_of(peer: str, caller: Caller | None) -> str:
    """Names the peer whose limits count: a caller; else the host, all of whose connections are one peer.

    Of this machine each connection is one: a run's own services and a stranger would otherwise share their limits.
    """
    if caller is not None and caller.roles:
        return f"{caller.role} {caller.name}"
    return peer if peer.startswith(_LOOPBACK) else peer.rpartition(":")[0]


class PeerCalls:
    """Counts by the keys of `key_of`."""

    def __init__(
        self, max_calls: int, max_bytes: int = MAX_BYTES_PER_PEER, max_receiving: int = MAX_RECEIVING_PER_PEER
    ) -> None:
        self._max_calls = max_calls
        self._max_receiving = max_receiving
        self._calls: Counter[str] = Counter()
        self._bytes = PeerBytes(max_bytes)
        self._receiving: dict[str, asyncio.Semaphore] = {}

    @property
    def in_progress(self) -> int:
        """Calls of all peers."""
        return self._calls.total()

    def one_of(self, key: str, caller: Caller | None = None) -> OneCall:
        """A context around a call. Entering it raises ResourceExhausted when the peer has too many."""
        return OneCall(self, key, is_limited=caller is None or Role.SERVICE not in caller.roles)

    def begin(self, key: str) -> None:
        """Raises ResourceExhausted when the peer has too many calls."""
        if self._calls[key] >= self._max_calls:
            raise ResourceExhausted(
                f"{key} has {self._calls[key]} calls in progress, the most that one peer may have: wait for some of "
                "them, or raise the server's limit",
                retry_after_seconds=_RETRY_SECONDS,
                reason="TOO_MANY_CALLS",
                max_calls=str(self._max_calls),
            )
        self._calls[key] += 1

    def end(self, key: str, num_bytes: int) -> None:
        """The call is over, and its request is no longer held."""
        self._bytes.release(key, num_bytes)
        self._calls[key] -= 1
        if not self._calls[key]:
            del self._calls[key]
            self._receiving.pop(key, None)

    def receiving(self, key: str) -> asyncio.Semaphore:
        """A place for one request on its way, which waits until there is one."""
        return self._receiving.setdefault(key, asyncio.Semaphore(self._max_receiving))

    def take_bytes(self, key: str, num_bytes: int) -> None:
        """Raises ResourceExhausted."""
        self._bytes.take(key, num_bytes)


class OneCall:
    """Every waiting call has one: a generator of contextlib's would be ten times its size."""

    __slots__ = ("_calls", "_is_limited", "_key", "_num_bytes")

    def __init__(self, calls: PeerCalls, key: str, *, is_limited: bool) -> None:
        self._calls = calls
        self._key = key
        self._is_limited = is_limited
        self._num_bytes = 0

    def __enter__(self) -> OneCall:
        self._calls.begin(self._key)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.end(self._key, self._num_bytes)

    def receiving(self) -> asyncio.Semaphore:
        """A place for the request on its way."""
        return self._calls.receiving(self._key)

    def received(self, num_bytes: int) -> None:
        """Raises ResourceExhausted where the peer's requests have too many bytes; a run's own services' may."""
        if self._is_limited:
            self._calls.take_bytes(self._key, num_bytes)
            self._num_bytes = num_bytes


class PeerBytes:
    """Bytes of requests that a server holds, by peer."""

    def __init__(self, max_bytes: int = MAX_BYTES_PER_PEER) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    def take(self, key: str, num_bytes: int) -> None:
        """Raises ResourceExhausted when the peer would hold too many."""
        if self._bytes[key] + num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"requests of {key} that are not answered yet have {self._bytes[key] + num_bytes:,} bytes, may have "
                f"{self._max_bytes:,}: send fewer of them at once",
                retry_after_seconds=_RETRY_SECONDS,
                reason="TOO_MANY_BYTES",
                max_bytes=str(self._max_bytes),
            )
        self._bytes[key] += num_bytes

    def release(self, key: str, num_bytes: int) -> None:
        """They are no longer held."""
        self._bytes[key] -= num_bytes
        if self._bytes[key] <= 0:
            del self._bytes[key]

    @contextmanager
    def held(self, key: str) -> Iterator[Held]:
        """Around a request whose bytes come one after the other."""
        held = Held(self, key)
        try:
            yield held
        finally:
            self.release(key, held.num_bytes)


class Held:
    """The bytes of one request so far."""

    def __init__(self, of: PeerBytes, key: str) -> None:
        self._of = of
        self._key = key
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises ResourceExhausted."""
        self._of.take(self._key, num_bytes)
        self.num_bytes += num_bytes
