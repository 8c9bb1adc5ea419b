"""A Parquet file is read by row groups, its blocks. A slice counts rows from 0; messages count them from 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import InvalidArgument
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import FileSource
from services.buffer.prompts.files import Block, BlockPlace, RowReader, edges_digest, open_regular
from services.buffer.prompts.reader import check_num_rows, unreadable


class ParquetRows:
    """The columns in use are held in memory, in Arrow's compact form."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        source = reader.source
        file = _opened(source)
        check_num_rows(Path(source.path), file.metadata.num_rows)
        table = file.read(columns=_columns(source, file))
        end = table.num_rows if source.end_row is None else min(source.end_row, table.num_rows)
        self._first = min(source.first_row, end)
        self._table = table.slice(self._first, end - self._first)
        self._indices: Sequence[int] = range(self._table.num_rows)
        self.digest = edges_digest(Path(source.path))

    def numbers(self) -> Iterator[int]:
        return (self._first + index + 1 for index in self._indices)

    def retain(self, indices: Sequence[int]) -> None:
        self._indices = [self._indices[i] for i in indices]

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        places = [self._indices[i] for i in indices]
        rows = self._table.take(places).to_pylist()
        return [
            self._reader.from_row(_without_nulls(row), self._first + place + 1, epoch)
            for place, row in zip(places, rows, strict=True)
        ]


class ParquetBlocks:
    """Cuts a file of any size at its row groups. A block's start is (row group, rows before it)."""

    def __init__(self, reader: RowReader) -> None:
        self._source = reader.source
        file = _opened(self._source)
        _columns(self._source, file)
        metadata = file.metadata
        self._lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.digest = edges_digest(Path(self._source.path))

    def start(self) -> BlockPlace:
        """Finds the row group in which the slice begins."""
        place = BlockPlace(0, 0)
        while place.offset < len(self._lengths):
            rows = self._lengths[place.offset]
            if place.line + rows > self._source.first_row:
                break
            place = BlockPlace(place.offset + 1, place.line + rows)
        return place

    def end_of(self, place: BlockPlace) -> BlockPlace | None:
        """Returns the next row group, or None behind the last one of the slice."""
        end = self._source.end_row
        if place.offset >= len(self._lengths) or (end is not None and place.line >= end):
            return None
        return BlockPlace(place.offset + 1, place.line + self._lengths[place.offset])


def read_parquet_block(reader: RowReader, epoch: int, place: BlockPlace, end: BlockPlace) -> Block:
    """Parses the rows of one row group that are in the slice. Runs in a worker."""
    source = reader.source
    block = Block(source.skip_bad_lines)
    file = _opened(source)
    table = file.read_row_group(place.offset, columns=_columns(source, file))
    for number, row in enumerate(table.to_pylist(), place.line + 1):
        if number > source.first_row and (source.end_row is None or number <= source.end_row):
            block.add(reader.from_row, _without_nulls(row), number, epoch)
    return block


def _opened(source: FileSource) -> pq.ParquetFile:
    try:
        with open_regular(source.path):
            return pq.ParquetFile(source.path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise InvalidArgument(
            f"prompt file {source.path} is not parquet: {error}", field="config.files.path"
        ) from error
    except OSError as error:
        raise unreadable(Path(source.path), error) from error


def _columns(source: FileSource, file: pq.ParquetFile) -> list[str]:
    """Returns the columns to read. Raises InvalidArgument when a required one is missing."""
    schema = file.schema_arrow
    there = list(schema.names)
    for name, key in (("input_key", source.input_key), ("label_key", source.label_key)):
        if key is not None and _column_of(schema, key) is None:
            raise InvalidArgument(
                f"prompt file {source.path} has no column {key!r} ({name}); the columns are "
                f"{', '.join(_shown_column(schema, name) for name in there)}",
                field="config.files.path",
            )
    optional = (source.metadata_key, source.tool_key, source.priority_key, source.image_key)
    keys = (source.input_key, source.label_key, *optional)
    columns = [_column_of(schema, key) for key in keys if key is not None]
    return [column for column in dict.fromkeys(columns) if column is not None]


def _column_of(schema: pa.Schema, key: str) -> str | None:
    """The column that holds a key: of `a.b` the struct a, where it has a field b. None without one."""
    if key in schema.names:
        return key
    column, *names = key.split(".")
    if not names or column not in schema.names:
        return None
    kind = schema.field(column).type
    for name in names:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return column


def _shown_column(schema: pa.Schema, name: str) -> str:
    """`reward_model {ground_truth, style}` for a struct."""
    kind = schema.field(name).type
    return f"{name} {{{', '.join(field.name for field in kind)}}}" if pa.types.is_struct(kind) else name


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of its column: those that a row does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
