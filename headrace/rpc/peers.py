"""Limits the calls that one peer may have at once, so that a runaway client does not crowd out the others."""

from __future__ import annotations

from collections import Counter

from headrace.errors import ResourceExhausted

DEFAULT_MAX_CALLS = 40_000


class PeerCalls:
    """Counted by host: all connections of a machine are one peer."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._calls: Counter[str] = Counter()

    @property
    def in_progress(self) -> int:
        """Calls of all peers."""
        return self._calls.total()

    def one_of(self, peer: str) -> _OneCall:
        """A context around a call. Entering it raises ResourceExhausted when the peer has too many."""
        return _OneCall(self, peer.rpartition(":")[0])

    def begin(self, host: str) -> None:
        """Raises ResourceExhausted when the host has too many calls."""
        if self._calls[host] >= self._max_calls:
            raise ResourceExhausted(
                f"{host} has {self._calls[host]} calls in progress, the most that one peer may have: wait for some of "
                "them, or raise the server's limit",
                reason="TOO_MANY_CALLS",
                max_calls=str(self._max_calls),
            )
        self._calls[host] += 1

    def end(self, host: str) -> None:
        self._calls[host] -= 1
        if not self._calls[host]:
            del self._calls[host]


class _OneCall:
    """Every waiting call has one: a generator of contextlib's would be ten times its size."""

    __slots__ = ("_calls", "_host")

    def __init__(self, calls: PeerCalls, host: str) -> None:
        self._calls = calls
        self._host = host

    def __enter__(self) -> None:
        self._calls.begin(self._host)

    def __exit__(self, *_: object) -> None:
        self._calls.end(self._host)
