"""A prompt file larger than memory: read in blocks, the next ones parsed ahead in worker processes.

Nothing is known of the file before it is read, so a bad line is met in the middle of the run: refused with its number,
or counted and passed over. Shuffling is inside of blocks: the order of a block is drawn from (seed, epoch, its place).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import HeadraceError, InvalidArgument
from headrace.process.workers import WorkerPool, WorkerRaised
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.files import open_regular
from services.buffer.prompts.indexed import drawn_order
from services.buffer.prompts.reader import PromptEntry, Reading, without_prompts
from services.buffer.prompts.row import RowReader

_BLOCK_SECONDS = 120.0
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The start of a block: its byte offset or row group, and the number of rows before it."""

    offset: int
    line: int


@dataclass(slots=True)
class Block:
    """Parsed prompts in the file's order. A bad row is kept as its complaint unless bad ones are passed over."""

    skip_bad_lines: bool
    prompts: list[Prompt] = field(default_factory=list)
    bad_lines: int = 0
    complaint: str | None = None

    def add(self, parse: Callable[[Any, int, int], Prompt], row: Any, number: int, epoch: int) -> None:
        """Parses the row; a bad row is counted, and the first complaint is stored."""
        try:
            self.prompts.append(parse(row, number, epoch))
        except InvalidArgument as error:
            self.bad_lines += 1
            if not self.skip_bad_lines and self.complaint is None:
                self.complaint = error.message


class Blocks(Protocol):
    """Says where the blocks of a file begin. Both methods are cheap, because they parse nothing."""

    digest: str

    def start(self) -> BlockPlace:
        """Returns the start of an epoch's first block."""

    def end_of(self, place: BlockPlace) -> BlockPlace | None:
        """Returns the start of the next block, or None when nothing follows `place`."""


BlockReader = Callable[[RowReader, int, BlockPlace, BlockPlace], Block]


class StreamedFile:
    """Holds the block being read and as many parsed ahead as there are workers."""

    bad_lines = 0

    def __init__(self, blocks: Blocks, read_block: BlockReader, reader: RowReader, readers: BlockingPool) -> None:
        self._blocks = blocks
        self._readers = readers
        self._read_block = read_block
        self._reader = reader
        self._source = reader.source
        self._pool = WorkerPool(reader.source.num_workers)
        self._ahead: dict[tuple[int, BlockPlace], asyncio.Task[Block]] = {}
        self.digest = blocks.digest
        if blocks.end_of(blocks.start()) is None:
            raise without_prompts(Path(self._source.path))

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts; fewer where the last epoch ends. Raises InvalidArgument at a bad line."""
        entries: list[PromptEntry] = []
        while len(entries) < count and not self.is_end(cursor):
            place, end = await self._readers.run(self._bounds, cursor)
            if end is None:
                cursor = self._next_epoch(cursor)
                continue
            block = await self._block(cursor.epoch, place, end)
            order = self._order(cursor.epoch, place, len(block.prompts))
            for row in order[cursor.row : cursor.row + count - len(entries)]:
                cursor = replace(
                    cursor,
                    offset=place.offset,
                    line=place.line,
                    row=cursor.row + 1,
                    prompts_read=cursor.prompts_read + 1,
                )
                entries.append(PromptEntry(block.prompts[row], cursor))
            if cursor.row >= len(order):
                bad_lines = cursor.bad_lines + (block.bad_lines if cursor.epoch == 0 else 0)
                cursor = replace(cursor, offset=end.offset, line=end.line, row=0, bad_lines=bad_lines)
                if entries:
                    entries[-1] = replace(entries[-1], cursor=cursor)
        return Reading(entries, cursor)

    def is_end(self, cursor: Cursor) -> bool:
        """True when all epochs were read."""
        return self._source.num_epochs is not None and cursor.epoch >= self._source.num_epochs

    async def close(self) -> None:
        for task in self._ahead.values():
            task.cancel()
        await asyncio.gather(*self._ahead.values(), return_exceptions=True)
        await self._pool.close()

    def _bounds(self, cursor: Cursor) -> tuple[BlockPlace, BlockPlace | None]:
        place = BlockPlace(cursor.offset, cursor.line) if cursor.line else self._blocks.start()
        return place, self._blocks.end_of(place)

    def _next_epoch(self, cursor: Cursor) -> Cursor:
        if cursor.prompts_read == 0:
            raise without_prompts(Path(self._source.path))
        return replace(cursor, epoch=cursor.epoch + 1, offset=0, line=0, row=0)

    def _order(self, epoch: int, place: BlockPlace, length: int) -> list[int]:
        if not self._source.shuffle:
            return list(range(length))
        return drawn_order(length, f"{self._source.seed}/{epoch}/{place.line}")

    async def _block(self, epoch: int, place: BlockPlace, end: BlockPlace) -> Block:
        wanted = await self._readers.run(self._coming, place, end)
        for key in [key for key in self._ahead if key[0] != epoch or key[1] not in wanted]:
            self._ahead.pop(key).cancel()
        for begin, finish in wanted.items():
            if (epoch, begin) not in self._ahead:
                self._ahead[epoch, begin] = asyncio.create_task(self._parsed(epoch, begin, finish))
        block = await asyncio.shield(self._ahead[epoch, place])
        if block.complaint:
            raise InvalidArgument(block.complaint, field="config.files.path", reason="BAD_LINE")
        return block

    def _coming(self, place: BlockPlace, end: BlockPlace) -> dict[BlockPlace, BlockPlace]:
        """Returns start and end of this block and of those to be parsed ahead."""
        coming, begin, finish = {place: end}, end, self._blocks.end_of(end)
        while finish is not None and len(coming) <= self._source.num_workers:
            coming[begin] = finish
            begin, finish = finish, self._blocks.end_of(finish)
        return coming

    async def _parsed(self, epoch: int, place: BlockPlace, end: BlockPlace) -> Block:
        work = (self._reader, epoch, place, end)
        try:
            block: Block = await self._pool.run(self._read_block, *work, timeout_seconds=_BLOCK_SECONDS)
        except WorkerRaised as error:
            raise HeadraceError(f"{self._source.path} from row {place.line} on: {error.message}") from error
        return block


def edges_digest(path: Path) -> str:
    """SHA-256 over the length and both ends: a file larger than memory is not read twice to know it again."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open_regular(path) as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(size - _EDGE_BYTES, 0))
        digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()
