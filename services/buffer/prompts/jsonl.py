"""JSONL has one JSON object a line; blank lines are allowed. A slice [a:b] counts lines from 0.

A JSON array and CSV are tables: they are read as a whole, and a slice counts their rows from 0.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import InvalidArgument
from headrace.limits import MAX_PROMPT_LINE_BYTES
from headrace.prompts import is_table, table
from services.buffer.ledger.group import Prompt
from services.buffer.prompts.files import Block, BlockPlace, RowReader, edges_digest, open_regular, open_same
from services.buffer.prompts.reader import check_num_rows, unreadable

_LINES_PER_BLOCK = 1024
_BYTES_PER_BLOCK = 32 << 20


class JsonlRows:
    """Memory holds the offset and the number of each line, and not the lines."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._path = Path(reader.source.path)
        self._offsets = array("Q")
        self._lines = array("Q")
        self._inode = 0
        self.digest = self._index()

    def numbers(self) -> Iterator[int]:
        return iter(self._lines)

    def retain(self, indices: Sequence[int]) -> None:
        self._offsets = array("Q", (self._offsets[i] for i in indices))
        self._lines = array("Q", (self._lines[i] for i in indices))

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        found = []
        with open_same(self._path, self._inode) as file:
            for i in indices:
                file.seek(self._offsets[i])
                found.append(self._reader.from_line(_line_of(file), self._lines[i], epoch))
        return found

    def _index(self) -> str:
        first, end = self._reader.source.first_row, self._reader.source.end_row
        digest = hashlib.sha256()
        offset = 0
        try:
            with open_regular(self._path) as file:
                self._inode = os.fstat(file.fileno()).st_ino
                for number, line in enumerate(iter(lambda: _line_of(file), b""), 1):
                    _check_size(self._path, number, line)
                    digest.update(line)
                    if line.strip() and number > first and (end is None or number <= end):
                        check_num_rows(self._path, len(self._lines) + 1)
                        self._offsets.append(offset)
                        self._lines.append(number)
                    offset += len(line)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return digest.hexdigest()


class TableRows:
    """The rows of a table are held in memory."""

    def __init__(self, reader: RowReader, rows: Sequence[Any]) -> None:
        self._reader = reader
        source = reader.source
        check_num_rows(Path(source.path), len(rows))
        self._rows = list(enumerate(rows, 1))[source.first_row : source.end_row]
        self.digest = edges_digest(Path(source.path))

    def numbers(self) -> Iterator[int]:
        return (number for number, _ in self._rows)

    def retain(self, indices: Sequence[int]) -> None:
        self._rows = [self._rows[i] for i in indices]

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        return [self._reader.from_line(row, number, epoch) for number, row in map(self._rows.__getitem__, indices)]


def lines_or_table(reader: RowReader) -> JsonlRows | TableRows:
    """The rows of a file of JSON lines, or of a JSON array or CSV. Raises InvalidArgument for other files."""
    path = Path(reader.source.path)
    try:
        with open_regular(path) as file:
            rows = table(file, path)
    except OSError as error:
        raise unreadable(path, error) from error
    return JsonlRows(reader) if rows is None else TableRows(reader, rows)


def _line_of(file: BinaryIO) -> bytes:
    """Reads one byte more than a line may have, so that a longer one is noticed."""
    return file.readline(MAX_PROMPT_LINE_BYTES + 1)


def _sized(path: Path, before: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(lines, before + 1):
        _check_size(path, number, line)
        yield line


def _check_size(path: Path, number: int, line: bytes) -> None:
    if len(line) > MAX_PROMPT_LINE_BYTES:
        raise InvalidArgument(
            f"{path}, line {number} is longer than {MAX_PROMPT_LINE_BYTES} bytes",
            field="config.files.path",
            reason="BAD_LINE",
        )


class JsonlBlocks:
    """Cuts a file of any size into blocks of lines. A block's start is (byte offset, lines before it)."""

    def __init__(self, reader: RowReader) -> None:
        self._source = reader.source
        self._path = Path(reader.source.path)
        self._start: BlockPlace | None = None
        try:
            with open_regular(self._path) as file:
                is_a_table = is_table(file, self._path)
            self.digest = edges_digest(self._path)
        except OSError as error:
            raise unreadable(self._path, error) from error
        if is_a_table:
            raise InvalidArgument(
                f"prompt file {self._path} is a JSON array or CSV, which cannot be streamed: write one JSON object a "
                "line, or leave out streaming_data",
                field="config.files.path",
            )

    def start(self) -> BlockPlace:
        """Finds the first line of the slice."""
        if self._start is None:
            self._start = self._after(BlockPlace(0, 0), self._source.first_row, is_block=False)
        return self._start

    def end_of(self, place: BlockPlace) -> BlockPlace | None:
        """Returns the start of the next block, or None when no lines follow `place`."""
        end = self._source.end_row
        count = _LINES_PER_BLOCK if end is None else min(_LINES_PER_BLOCK, end - place.line)
        after = self._after(place, count, is_block=True)
        return None if after.line == place.line else after

    def _after(self, place: BlockPlace, count: int, *, is_block: bool) -> BlockPlace:
        with open_regular(self._path) as file:
            file.seek(place.offset)
            lines = islice(iter(lambda: _line_of(file), b""), max(count, 0))
            num_bytes = num_lines = 0
            for line in _sized(self._path, place.line, lines):
                num_bytes, num_lines = num_bytes + len(line), num_lines + 1
                if is_block and num_bytes >= _BYTES_PER_BLOCK:
                    break
        return BlockPlace(place.offset + num_bytes, place.line + num_lines)


def read_jsonl_block(reader: RowReader, epoch: int, place: BlockPlace, end: BlockPlace) -> Block:
    """Parses the lines of one block. Runs in a worker."""
    block = Block(reader.source.skip_bad_lines)
    with open_regular(reader.source.path) as file:
        file.seek(place.offset)
        data = file.read(end.offset - place.offset)
    for number, line in enumerate(BytesIO(data), place.line + 1):
        if line.strip():
            block.add(reader.from_line, line, number, epoch)
    return block
