"""A stream's prompt sources are read side by side; the ledger decides how many prompts of which source come next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.reader import PromptEntry, PromptReader, Reading


@dataclass(frozen=True, slots=True)
class MixReading:
    """The prompts of every source, the cursor behind them, and whether the source has ended."""

    prompts: Sequence[Sequence[Prompt]]
    cursors: tuple[Cursor, ...]
    ended: tuple[bool, ...]
    finished: Mapping[str, tuple[bytes, ...]]
    """Prompt id → the serialized samples that it came with."""


def finished_of(entries: Iterable[PromptEntry]) -> dict[str, tuple[bytes, ...]]:
    """Prompt id → samples, of the entries that have some."""
    return {entry.prompt.prompt_id: entry.samples for entry in entries if entry.samples}


class PromptMix:
    def __init__(self, readers: Sequence[PromptReader]) -> None:
        self._readers = readers

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(reader.digest for reader in self._readers)

    @property
    def bad_lines(self) -> int:
        """Found when the readers were opened."""
        return sum(reader.bad_lines for reader in self._readers)

    def start(self) -> tuple[Cursor, ...]:
        """Returns the cursors of a new stream."""
        return tuple(Cursor() for _ in self._readers)

    async def read(self, cursors: Sequence[Cursor], counts: Sequence[int]) -> MixReading:
        """The next prompts, `counts` of each source; fewer where it ends."""
        readings = [
            await reader.read(cursor, count) if count else Reading((), cursor)
            for reader, cursor, count in zip(self._readers, cursors, counts, strict=True)
        ]
        moved = tuple(reading.cursor for reading in readings)
        ended = tuple(reader.is_end(cursor) for reader, cursor in zip(self._readers, moved, strict=True))
        prompts = [[entry.prompt for entry in reading.entries] for reading in readings]
        finished = finished_of(entry for reading in readings for entry in reading.entries)
        return MixReading(prompts, moved, ended, finished)

    async def close(self) -> None:
        for reader in self._readers:
            await reader.close()
