"""How much a piece of work does, in calls of functions: the same on a busy machine, where seconds are not."""

from __future__ import annotations

from _lsprof import Profiler
from itertools import count
from types import TracebackType
from typing import Self


class CallCounter:
    """Counts the calls of functions, Python's own and C's, that its thread makes inside `with` blocks."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._ticks = count()
        # It asks for the time at the start and the end of each function, and gets the number of the question.
        self._profiler = Profiler(self._ticks.__next__, 1.0, False, True)

    def __enter__(self) -> Self:
        self._began = next(self._ticks)
        self._profiler.enable(subcalls=False, builtins=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._profiler.disable()
        self.num_calls += (next(self._ticks) - self._began) // 2
