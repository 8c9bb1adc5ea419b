"""Several prompt sources as one: which of them gives the next prompt follows from their weights and from nothing else.

The next prompt comes from the source whose share is furthest behind: the smallest (prompts_read + 1) / weight, the
first of equals. So the walk is the same whenever it is walked, its state is the sources' cursors, and at every moment
the shares are as close to the weights as whole prompts allow. A source at its end leaves its share to the others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.group import Prompt
from services.buffer.prompts.walk import PromptWalk
from services.buffer.source import Cursor


@dataclass(frozen=True, slots=True)
class MixReading:
    """Some prompts, and where to go on in every source."""

    prompts: list[Prompt]
    cursors: tuple[Cursor, ...]
    exhausted: bool


class PromptMix:
    """One weight for each walk."""

    def __init__(self, walks: Sequence[PromptWalk], weights: Sequence[float]) -> None:
        self._walks = walks
        self._weights = weights

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the walks, in order."""
        return tuple(walk.digest for walk in self._walks)

    @property
    def bad_lines(self) -> int:
        """Found when the walks were opened."""
        return sum(walk.bad_lines for walk in self._walks)

    def start(self) -> tuple[Cursor, ...]:
        """Where a new stream begins."""
        return tuple(Cursor() for _ in self._walks)

    async def read(self, cursors: Sequence[Cursor], count: int) -> MixReading:
        """The next `count` prompts; fewer where all walks end."""
        at = list(cursors)
        prompts: list[Prompt] = []
        while len(prompts) < count and not self._is_end(at):
            prompts += await self._read_some(at, count - len(prompts))
        return MixReading(prompts, tuple(at), self._is_end(at))

    async def close(self) -> None:
        """Closes the walks."""
        for walk in self._walks:
            await walk.close()

    async def _read_some(self, at: list[Cursor], count: int) -> list[Prompt]:
        """At least one prompt, or one walk more at its end. Moves `at`."""
        turns = self._turns(at, count)
        readings = {i: await self._walks[i].read(at[i], share) for i, share in sorted(Counter(turns).items())}
        left = {i: iter(reading.steps) for i, reading in readings.items()}
        prompts: list[Prompt] = []
        for i in turns:
            step = next(left[i], None)
            if step is None:
                at[i] = readings[i].cursor
                break
            prompts.append(step.prompt)
            at[i] = step.cursor
        return prompts

    def _turns(self, at: Sequence[Cursor], count: int) -> list[int]:
        heap = [
            ((cursor.prompts_read + 1) / self._weights[i], i, cursor.prompts_read + 1)
            for i, cursor in enumerate(at)
            if not self._walks[i].is_end(cursor)
        ]
        heapq.heapify(heap)
        turns = []
        for _ in range(count):
            _, i, nth = heap[0]
            turns.append(i)
            heapq.heapreplace(heap, ((nth + 1) / self._weights[i], i, nth + 1))
        return turns

    def _is_end(self, at: Sequence[Cursor]) -> bool:
        return all(walk.is_end(cursor) for walk, cursor in zip(self._walks, at, strict=True))
