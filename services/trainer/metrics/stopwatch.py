"""Seconds by part of a rank's work, on the device that does it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Parts may come many times; `read` adds them up. On a GPU its own events are read, so nothing waits meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the block, and on a GPU the work that it gives to the GPU."""
        if self._on_gpu:
            first, last = _event(), _event()
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            with self.host_part(name):
                yield

    @contextmanager
    def host_part(self, name: str) -> Iterator[None]:
        """Times the block by the CPU's clock, on any device."""
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Seconds by part since the last read. Waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
        for name, first, last in self._events:
            self._seconds[name] += first.elapsed_time(last) / 1000
        found = dict(self._seconds)
        self._events.clear()
        self._seconds.clear()
        return found


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
    return event
