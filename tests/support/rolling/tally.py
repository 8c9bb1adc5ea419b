"""Counts calls by their client, what failed, and how long the slowest took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{'client':<28}{'calls':>8}{'longest':>10}"
        for name, number in sorted(self.calls.items()):
            yield f"{name:<28}{number:>8}{self.longest.get(name, 0.0):>9.1f}s"
        yield f"{sum(self.calls.values())} calls, {len(self.failed)} failed"
