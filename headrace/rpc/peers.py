"""How many calls one peer may have at once: a client gone wild is refused and does not crowd the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def one_of(self, peer: str) -> Iterator[None]:
        """Around a call. Raises ResourceExhausted when the peer has too many."""
        host = peer.rpartition(":")[0]
        if self._calls[host] >= self._max_calls:
            raise ResourceExhausted(
                f"{host} has {self._calls[host]} calls in progress, the most that one peer may have: wait for some of "
                "them, or raise the server's limit",
                reason="TOO_MANY_CALLS",
                max_calls=str(self._max_calls),
            )
        self._calls[host] += 1
        try:
            yield
        finally:
            self._calls[host] -= 1
            if not self._calls[host]:
                del self._calls[host]
