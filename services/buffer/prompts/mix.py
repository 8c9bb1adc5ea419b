"""A stream's prompt sources are read side by side; the ledger decides how many prompts of which source come next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.walk import PromptWalk, Reading, Step


@dataclass(frozen=True, slots=True)
class MixReading:
    """The prompts of every source, the cursor behind them, and whether the source has ended."""

    prompts: Sequence[Sequence[Prompt]]
    cursors: tuple[Cursor, ...]
    ended: tuple[bool, ...]
    finished: Mapping[str, tuple[bytes, ...]]
    """Prompt id → the serialized samples that it came with."""


def finished_of(steps: Iterable[Step]) -> dict[str, tuple[bytes, ...]]:
    """Prompt id → samples, of the steps that have some."""
    return {step.prompt.prompt_id: step.samples for step in steps if step.samples}


class PromptMix:
    def __init__(self, walks: Sequence[PromptWalk]) -> None:
        self._walks = walks

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(walk.digest for walk in self._walks)

    @property
    def bad_lines(self) -> int:
        """Found when the walks were opened."""
        return sum(walk.bad_lines for walk in self._walks)

    def start(self) -> tuple[Cursor, ...]:
        """Returns the cursors of a new stream."""
        return tuple(Cursor() for _ in self._walks)

    async def read(self, cursors: Sequence[Cursor], counts: Sequence[int]) -> MixReading:
        """The next prompts, `counts` of each source; fewer where its walk ends."""
        readings = [
            await walk.read(cursor, count) if count else Reading((), cursor)
            for walk, cursor, count in zip(self._walks, cursors, counts, strict=True)
        ]
        moved = tuple(reading.cursor for reading in readings)
        ended = tuple(walk.is_end(cursor) for walk, cursor in zip(self._walks, moved, strict=True))
        prompts = [[step.prompt for step in reading.steps] for reading in readings]
        return MixReading(prompts, moved, ended, finished_of(step for reading in readings for step in reading.steps))

    async def close(self) -> None:
        for walk in self._walks:
            await walk.close()
