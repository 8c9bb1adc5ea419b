"""Prompt files: which of them may be read, how a row becomes a prompt, and their readers, at random or in blocks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import HeadraceError, InvalidArgument
from headrace.images import with_images
from headrace.limits import MAX_PROMPT_BYTES, shown
from headrace.process.workers import WorkerPool, WorkerRaised
from headrace.prompts import content_of, ordered_json, parse_row, required, set_content, set_label, typed_value
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import Cursor, FileSource
from services.buffer.prompts.reader import PromptEntry, Reading, without_prompts

# Decides which files may be read as prompts and opens them; pipes, devices and files elsewhere are never opened.
# The job may name any file. Clients may name files below one folder, which the job sets (--prompt-root).

_FIELD = "config.files.path"


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """`own` are the job's files; None allows every file, for a program that opens the buffer itself."""

    root: Path | None = None
    own: Collection[str] | None = None

    def of_client(self, path: str) -> str:
        """Resolves symbolic links. Raises InvalidArgument for a file outside of the root."""
        if self.root is None:
            raise InvalidArgument(
                "clients may not name prompt files, as the job has no --prompt-root: submit prompts, or start the "
                "buffer with the folder of the files that they may name",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        root = Path(os.path.realpath(self.root))
        real = Path(os.path.realpath(root / path))
        if root not in real.parents:
            raise InvalidArgument(
                f"prompt file {shown(path)} is not below the folder of --prompt-root: name a file in there",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        return str(real)

    def check(self, path: str) -> None:
        """Raises InvalidArgument when a stream's file may not be read any more."""
        if self.own is not None and path not in self.own:
            self.of_client(path)


def open_same(path: str | Path, inode: int) -> BinaryIO:
    """Raises InvalidArgument when another file has the name now."""
    file = open_regular(path)
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise InvalidArgument(
            f"prompt file {path} was replaced since it was opened", field=_FIELD, reason="PROMPT_FILE_REFUSED"
        )
    return file


def open_regular(path: str | Path) -> BinaryIO:
    """Raises OSError when the file does not exist, InvalidArgument when it is not a regular file."""
    # O_NONBLOCK: a pipe would keep us until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"prompt file {path} is not a regular file", field=_FIELD, reason="PROMPT_FILE_REFUSED")
    return os.fdopen(descriptor, "rb")


@dataclass(frozen=True, slots=True)
class RowReader:
    """`name` stands for the file in the ids of its prompts: <name>:<line>@<epoch>."""

    source: FileSource
    name: str

    def from_line(self, line: Any, number: int, epoch: int) -> Prompt:
        """A line of JSONL or a row of a table, counted from 1. Raises InvalidArgument naming path and line."""
        try:
            row = parse_row(line)
        except InvalidArgument as error:
            raise self._bad(number, error) from error
        return self.from_row(row, number, epoch)

    def from_row(self, row: dict[str, Any], number: int, epoch: int) -> Prompt:
        """A row, counted from 1. Raises InvalidArgument naming path and line."""
        try:
            prompt = _to_prompt(self.source, row)
        except (ValueError, TypeError, RecursionError, InvalidArgument) as error:
            raise self._bad(number, error) from error
        prompt.prompt_id = f"{self.name}:{number}@{epoch}"
        if prompt.ByteSize() > MAX_PROMPT_BYTES:
            raise self._bad(
                number, ValueError(f"the prompt has {prompt.ByteSize()} bytes, may have {MAX_PROMPT_BYTES}")
            )
        return Prompt(prompt.prompt_id, prompt.SerializeToString(deterministic=True), prompt.priority)

    def _bad(self, number: int, error: Exception) -> InvalidArgument:
        return InvalidArgument(
            f"{self.source.path}, line {number}: {error}: correct it, or set skip_bad_lines",
            field="config.files.path",
            reason="BAD_LINE",
            path=self.source.path,
            line=str(number),
        )


def _to_prompt(source: FileSource, row: dict[str, Any]) -> sample_pb2.Prompt:
    prompt = sample_pb2.Prompt()
    content = content_of(row, source.input_key)
    if source.image_key:
        content = with_images(content, row, source.image_key, Path(source.path).parent)
    set_content(prompt, content)
    if source.label_key:
        set_label(prompt, required(row, source.label_key))
    if (metadata := typed_value(row, source.metadata_key, dict)) is not None:
        prompt.metadata_json = ordered_json(metadata)
    if (tools := typed_value(row, source.tool_key, list)) is not None:
        prompt.tools_json = ordered_json(tools)
    if (priority := typed_value(row, source.priority_key, int)) is not None:
        prompt.priority = priority
    return prompt


# A prompt file whose rows are found at random: every row once in every epoch, in the file's order or a drawn one.
# Opening reads the whole file once: bad lines are found before the first step, not in the middle of a run. A row is
# known by its line number; a prompt by file name, line and epoch.


class FileRows(Protocol):
    """The rows of a file's slice, good and bad, by index. They are parsed with the reader that was passed in."""

    digest: str

    def numbers(self) -> Iterator[int]:
        """The line number of each row; blank lines are no rows."""

    def retain(self, indices: Sequence[int]) -> None:
        """Drops all other rows; indices count the remaining ones from now on."""

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        """Raises InvalidArgument naming the line of a bad one."""


class IndexedFile:
    """Raises InvalidArgument naming path and line for a bad line, unless the source skips and counts them."""

    def __init__(self, rows: FileRows, reader: RowReader, readers: BlockingPool) -> None:
        self._rows = rows
        self._readers = readers
        self._source = reader.source
        self._epoch_order: tuple[int, Sequence[int]] | None = None
        good, total = [], 0
        for index, _ in enumerate(rows.numbers()):
            total += 1
            if self._is_good(index):
                good.append(index)
        if not good:
            raise without_prompts(Path(self._source.path))
        self.bad_lines = total - len(good)
        self.digest = rows.digest
        self._length = len(good)
        if self.bad_lines:
            rows.retain(good)

    def __len__(self) -> int:
        return self._length

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts; fewer where the last epoch ends."""
        return await self._readers.run(self._read, cursor, count)

    def is_end(self, cursor: Cursor) -> bool:
        return self._source.num_epochs is not None and cursor.epoch >= self._source.num_epochs

    async def close(self) -> None:
        """It holds nothing open."""

    def _read(self, cursor: Cursor, count: int) -> Reading:
        entries: list[PromptEntry] = []
        while len(entries) < count and not self.is_end(cursor):
            end = min(cursor.row + count - len(entries), len(self))
            rows = self._order(cursor.epoch)[cursor.row : end]
            for prompt in self._rows.prompts(rows, cursor.epoch):
                cursor = self._next(cursor)
                entries.append(PromptEntry(prompt, cursor))
        return Reading(entries, cursor)

    def _next(self, cursor: Cursor) -> Cursor:
        moved = replace(cursor, row=cursor.row + 1, prompts_read=cursor.prompts_read + 1)
        return moved if moved.row < len(self) else replace(moved, epoch=cursor.epoch + 1, row=0)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._source.shuffle:
            return range(len(self))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, shuffled_order(len(self), f"{self._source.seed}/{epoch}"))
        return self._epoch_order[1]

    def _is_good(self, index: int) -> bool:
        try:
            self._rows.prompts([index], epoch=0)
        except InvalidArgument:
            if not self._source.skip_bad_lines:
                raise
            return False
        return True


def shuffled_order(length: int, seed: str) -> list[int]:
    """Equal for equal arguments in every version: Python promises that for random(), and not for shuffle()."""
    generator = random.Random(seed)
    keys = np.fromiter((generator.random() for _ in range(length)), np.float64, length)
    # numpy sorts without the interpreter: of a million rows Python's own sort would hold it for a second.
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


# A prompt file larger than memory: read in blocks, the next ones parsed ahead in worker processes.
# Nothing is known of the file before it is read, so a bad line is met in the middle of the run: refused with its
# number, or counted and passed over. Shuffling is inside of blocks: the order of a block is drawn from (seed, epoch,
# its place).

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
        return shuffled_order(length, f"{self._source.seed}/{epoch}/{place.line}")

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
