"""The share of time in which engines had work, as far as the requests that are with them tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """Adds up engines' busy seconds. N requests keep at most N engines busy, and a standstill keeps none busy."""

    def __init__(self, num_engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_engines = num_engines
        self._clock = clock
        self._requests = 0
        self._stands_still = False
        self._busy_seconds = 0.0
        self._counted_until = clock()
        self._lap_began: float | None = None

    @contextmanager
    def requests(self, count: int = 1) -> Iterator[None]:
        """Counts `count` requests as being with the engines while the block runs."""
        self._count()
        self._requests += count
        try:
            yield
        finally:
            self._count()
            self._requests -= count

    def resize(self, num_engines: int) -> None:
        """The requests are shared by `num_engines` engines from now on."""
        self._count()
        self.num_engines = num_engines

    def stand_still(self) -> None:
        """All engines are about to pause for new weights."""
        self._count()
        self._stands_still = True

    def go_on(self) -> None:
        """An engine generates again."""
        self._count()
        self._stands_still = False

    def lap(self) -> float | None:
        """Returns the busy share of the engines' time since the last lap, in [0, 1]; None the first time."""
        self._count()
        began, self._lap_began = self._lap_began, self._counted_until
        busy_seconds, self._busy_seconds = self._busy_seconds, 0.0
        if began is None or self._counted_until <= began:
            return None
        return min(busy_seconds / (self._counted_until - began), 1.0)

    def _count(self) -> None:
        now = self._clock()
        if self.num_engines and not self._stands_still:
            share = min(self._requests / self.num_engines, 1.0)
            self._busy_seconds += (now - self._counted_until) * share
        self._counted_until = now
