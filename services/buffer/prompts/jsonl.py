"""JSONL: one JSON object a line, blank lines between them allowed. A slice [a:b] counts lines from 0."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path

from services.buffer.group import Prompt
from services.buffer.prompts.row import RowReader
from services.buffer.prompts.streamed import Block, BlockPlace, edges_digest
from services.buffer.prompts.walk import unreadable

_LINES_PER_BLOCK = 1024


class JsonlRows:
    """Only the offset and the number of each line are in memory."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._path = Path(reader.source.path)
        self._offsets = array("Q")
        self._lines = array("Q")
        self.digest = self._index()

    def numbers(self) -> Iterator[int]:
        return iter(self._lines)

    def keep(self, indices: Sequence[int]) -> None:
        self._offsets = array("Q", (self._offsets[i] for i in indices))
        self._lines = array("Q", (self._lines[i] for i in indices))

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        found = []
        with self._path.open("rb") as file:
            for i in indices:
                file.seek(self._offsets[i])
                found.append(self._reader.from_line(file.readline(), self._lines[i], epoch))
        return found

    def _index(self) -> str:
        first, end = self._reader.source.first_row, self._reader.source.end_row
        digest = hashlib.sha256()
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip() and number > first and (end is None or number <= end):
                        self._offsets.append(offset)
                        self._lines.append(number)
                    offset += len(line)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return digest.hexdigest()


class JsonlBlocks:
    """A file of any size in blocks of lines. A place is (byte offset, lines before it)."""

    def __init__(self, reader: RowReader) -> None:
        self._source = reader.source
        self._path = Path(reader.source.path)
        self._start: BlockPlace | None = None
        try:
            self.digest = edges_digest(self._path)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def start(self) -> BlockPlace:
        """Where the slice begins."""
        if self._start is None:
            self._start = self._after(BlockPlace(0, 0), self._source.first_row)
        return self._start

    def end_of(self, place: BlockPlace) -> BlockPlace | None:
        """Where the next block begins; None when there are no lines at `place`."""
        end = self._source.end_row
        count = _LINES_PER_BLOCK if end is None else min(_LINES_PER_BLOCK, end - place.line)
        after = self._after(place, count)
        return None if after.line == place.line else after

    def _after(self, place: BlockPlace, count: int) -> BlockPlace:
        with self._path.open("rb") as file:
            file.seek(place.offset)
            lengths = [len(line) for line in islice(file, max(count, 0))]
        return BlockPlace(place.offset + sum(lengths), place.line + len(lengths))


def read_jsonl_block(reader: RowReader, epoch: int, place: BlockPlace, end: BlockPlace) -> Block:
    """Runs in a worker. The lines of one block, parsed."""
    block = Block(reader.source.skip_bad_lines)
    with Path(reader.source.path).open("rb") as file:
        file.seek(place.offset)
        data = file.read(end.offset - place.offset)
    for number, line in enumerate(BytesIO(data), place.line + 1):
        if line.strip():
            block.add(reader.from_line, line, number, epoch)
    return block
