"""Names by key, smallest first, at a cost that does not grow with how many wait.

What comes in the order of its key, as nearly everything does, waits in a line; the rest in a heap beside it. A heap
alone touches some hundred entries scattered over memory when one is taken out of a million.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", int, float, tuple[int, int], tuple[float, int], tuple[int, float, int])


class NameHeap(Generic[_Key]):
    """Entries leave at the front only. Callers skip those that are obsolete, or remove them with `retain`."""

    def __init__(self) -> None:
        self._line: deque[tuple[_Key, str]] = deque()
        self._heap: list[tuple[_Key, str]] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def add(self, key: _Key, name: str) -> None:
        if not self._line or self._line[-1][0] <= key:
            self._line.append((key, name))
        else:
            heapq.heappush(self._heap, (key, name))

    def first(self) -> tuple[_Key, str] | None:
        """Returns the smallest entry and leaves it there."""
        if self._is_heap_first():
            return self._heap[0]
        return self._line[0] if self._line else None

    def pop(self) -> tuple[_Key, str]:
        """Removes and returns the smallest entry. There must be one."""
        return heapq.heappop(self._heap) if self._is_heap_first() else self._line.popleft()

    def retain(self, is_current: Callable[[_Key, str], bool]) -> None:
        """Removes the other entries. It reads all of them."""
        self._line = deque(entry for entry in self._line if is_current(*entry))
        self._heap = [entry for entry in self._heap if is_current(*entry)]
        heapq.heapify(self._heap)

    def _is_heap_first(self) -> bool:
        return bool(self._heap) and (not self._line or self._heap[0] < self._line[0])
