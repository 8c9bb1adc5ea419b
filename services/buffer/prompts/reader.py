"""Readers of prompt sources: of one, of several, of one shard's part. A cursor is all that a reader needs to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import InvalidArgument
from headrace.limits import MAX_FILE_ROWS
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import Cursor


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """A prompt, and the cursor behind it."""

    prompt: Prompt
    cursor: Cursor
    samples: tuple[bytes, ...] = ()
    """Serialized, where the group is finished already."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Some prompts, and where to go on: behind the last one, or at the end of the source."""

    entries: Sequence[PromptEntry]
    cursor: Cursor


class PromptReader(Protocol):
    """`digest` says which contents a cursor belongs to; `bad_lines` were found when it was opened."""

    digest: str
    bad_lines: int

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts; fewer only where the source ends."""

    def is_end(self, cursor: Cursor) -> bool:
        """True when no prompt follows."""

    async def close(self) -> None:
        """Ends it: no other method may be called afterwards."""


def unreadable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(
        f"prompt file {path}: {error.strerror or error}: it must be readable on the buffer's machine",
        field="config.files.path",
    )


def check_num_rows(path: Path, count: int) -> None:
    """Raises InvalidArgument for more rows than are kept in memory."""
    if count > MAX_FILE_ROWS:
        raise InvalidArgument(
            f"prompt file {path} has more than the {MAX_FILE_ROWS} rows that are kept in memory: set streaming",
            field="config.files.path",
        )


def without_prompts(path: Path) -> InvalidArgument:
    return InvalidArgument(f"prompt file {path} has no prompts", field="config.files.path")


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


# One shard's part of a source: of all its prompts in their order, those whose number is `shard` modulo `num_shards`.
# Every shard reads the whole source and returns its own prompts, so together they read each exactly once.


class ReaderShard:
    """`prompts_read` in its cursors counts every shard's prompts."""

    def __init__(self, whole: PromptReader, shard: int, num_shards: int) -> None:
        self._whole = whole
        self._shard = shard
        self._num_shards = num_shards
        self.digest = whole.digest
        self.bad_lines = whole.bad_lines

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """Reads to the `count`-th prompt of this shard and no further."""
        skip = (self._shard - cursor.prompts_read) % self._num_shards
        reading = await self._whole.read(cursor, skip + (count - 1) * self._num_shards + 1)
        return Reading(reading.entries[skip :: self._num_shards], reading.cursor)

    def is_end(self, cursor: Cursor) -> bool:
        return self._whole.is_end(cursor)

    async def close(self) -> None:
        await self._whole.close()
