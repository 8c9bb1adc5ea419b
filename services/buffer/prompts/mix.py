"""A stream's prompt sources side by side; whose turn it is, is the ledger's to say: see `lanes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.walk import PromptWalk, Reading


@dataclass(frozen=True, slots=True)
class MixReading:
    """Some prompts of every source, where to go on in it, and whether that is its end."""

    prompts: Sequence[Sequence[Prompt]]
    cursors: tuple[Cursor, ...]
    ended: tuple[bool, ...]


class PromptMix:
    """One walk for each source."""

    def __init__(self, walks: Sequence[PromptWalk]) -> None:
        self._walks = walks

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

    async def read(self, cursors: Sequence[Cursor], counts: Sequence[int]) -> MixReading:
        """The next prompts of every source, so many of each; fewer where its walk ends."""
        readings = [
            await walk.read(cursor, count) if count else Reading((), cursor)
            for walk, cursor, count in zip(self._walks, cursors, counts, strict=True)
        ]
        moved = tuple(reading.cursor for reading in readings)
        ended = tuple(walk.is_end(cursor) for walk, cursor in zip(self._walks, moved, strict=True))
        return MixReading([[step.prompt for step in reading.steps] for reading in readings], moved, ended)

    async def close(self) -> None:
        """Closes the walks."""
        for walk in self._walks:
            await walk.close()
