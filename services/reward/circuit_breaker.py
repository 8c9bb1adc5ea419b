"""Spares a scorer whose server is unreachable: after some calls in a row that did not reach it, one at a time tries it.

Closed: every call is made. Open: a call is refused at once, but one every `_TRY_SECONDS`, which closes it when the
server answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FAILURES = 5
"""Calls in a row that open it."""
_TRY_SECONDS = 2.0


class CircuitBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._is_trying = False
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    def admits(self) -> bool:
        """True for a call that may be made now."""
        return not self.is_open or (not self._is_trying and self._clock() >= self._next_try)

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call that was admitted. It says with `reached` or `not_reached` what came of it."""
        is_try = self.is_open
        self._is_trying |= is_try
        try:
            yield
        finally:
            if is_try:
                self._is_trying = False

    def reached(self) -> None:
        self._failures = 0

    def not_reached(self) -> None:
        self._failures += 1
        self._next_try = self._clock() + _TRY_SECONDS
