"""Counts calls by their client, what failed, and how long the slowest took."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CLIENTS = {
    "buffer": ("submit prompts", "put groups", "consume and commit", "stats", "plain submit", "plain put"),
    "reward": ("score", "plain score"),
    "rollout": ("generate", "fleet", "plain generate", "plain fleet"),
    "trainer": ("status of the trainer", "plain status"),
}


@dataclass
class Tally:
    """A call that raises is written down, and its client goes on."""

    calls: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around one call of a client."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a failed call
            self.failed.append(f"{name}: {type(error).__name__}: {error}"[:500])
        else:
            self.calls[name] += 1
        seconds = time.monotonic() - began
        self.longest[name] = max(self.longest.get(name, 0.0), seconds)

    async def until_all_have_called(self, services: Collection[str]) -> None:
        """Waits until every client of the services has finished another call."""
        before = {name: self.calls[name] for service in services for name in CLIENTS[service]}
        async with asyncio.timeout(600):
            while any(self.calls[name] == count for name, count in before.items()) and not self.failed:
                await asyncio.sleep(0.05)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{'client':<28}{'calls':>8}{'longest':>10}"
        for name, number in sorted(self.calls.items()):
            yield f"{name:<28}{number:>8}{self.longest.get(name, 0.0):>9.1f}s"
        yield f"{sum(self.calls.values())} calls, {len(self.failed)} failed"
