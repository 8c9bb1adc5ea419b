"""Tracks which services have stopped answering, so that their last state is not shown as current."""

from __future__ import annotations

import time
from collections.abc import Callable


class Silence:
    """A service that has never answered is starting, not silent."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        """When each service answered last"""
        self._silent: set[str] = set()

    def answered(self, service: str) -> None:
        """Marks the service as answering now."""
        self._answered[service] = self._clock()
        self._silent.discard(service)

    def unanswered(self, service: str) -> None:
        """Marks the service as silent, if it has answered before."""
        if service in self._answered:
            self._silent.add(service)

    def since(self) -> dict[str, str]:
        """The time of day of the last answer of each service that is silent."""
        times = {name: time.localtime(self._answered[name]) for name in sorted(self._silent)}
        return {name: time.strftime("%H:%M:%S", answered) for name, answered in times.items()}
