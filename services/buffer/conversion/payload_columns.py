"""The columns of a payload, without copies where it is large: they are slices of it.

A payload is walked by the headers of its fields; those of `rows`, which a producer writes first, are compared with the
bytes that they must be. What is not encoded as every encoder writes it is parsed by the generated class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import msgspec
import numpy as np

from headrace.sample_checks import COLUMN_DTYPES
from headrace.trajectory import parsed_payload
from headrace.wire.column import pack_column
from headrace.wire.json_text import from_json
from headrace.wire.protobuf import Payload, read_varint, varint

Column = tuple[str, int, tuple[int, ...], Payload]
"""(name, dtype, shape, data)."""

_COPIED_BYTES = 16 << 10
"""Up to this size a copy costs less than slices of a memoryview."""
_JSON_TAGS = frozenset((4 << 3 | 2, 5 << 3 | 2, 7 << 3 | 2, 8 << 3 | 2))
_TEXT_TAGS = frozenset((1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2)) | _JSON_TAGS
_COLUMN_TAG = 6 << 3 | 2
_HEADER_TAGS = 1 << 3 | 2, 2 << 3, 3 << 3 | 2
"""The tags of a column's name, dtype and shape, in this order."""
_DATA_TAG = 4 << 3 | 2
_ONE_BYTE = 127
"""The largest number in a byte of its own."""
_HEADER_BYTES = 256
"""The part of a column before its data: a name of 128 bytes and 8 dimensions fit."""
_ROWS_KEPT = 1 << 14


class TokenRow(msgspec.Struct, frozen=True, gc=False):
    """The required form of a column with one entry per token, and the bytes of a payload in front of its data."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    num_bytes: int
    header: bytes


@lru_cache(_ROWS_KEPT)
def row_of(name: str, length: int) -> TokenRow:
    """Returns the row of `length` entries, which nothing is allocated for."""
    column = pack_column(name, np.empty(0, COLUMN_DTYPES[name]))
    column.shape[:] = [length]
    num_bytes = length * COLUMN_DTYPES[name].itemsize
    header = column.SerializeToString() + (bytes([_DATA_TAG]) + varint(num_bytes) if num_bytes else b"")
    header = bytes([_COLUMN_TAG]) + varint(len(header) + num_bytes) + header
    return TokenRow(name, column.dtype, (length,), num_bytes, header)


def columns_of(sample_id: str, payload: Payload, rows: Sequence[TokenRow] = ()) -> list[Column]:
    """Raises InvalidArgument for bytes that are no payload, and for text that is not the JSON object it should be.

    Columns that are `rows`, in their order, are found fastest.
    """
    data = bytes(payload) if len(payload) <= _COPIED_BYTES else memoryview(payload)
    with suppress(IndexError, ValueError):  # not protobuf, or not as every encoder writes it
        return list(_walked(data, rows))
    message = parsed_payload(sample_id, bytes(payload))
    texts = message.metadata_json, message.sampling_params_json, message.train_metadata_json, message.hook_json
    for text in texts:
        if text:
            from_json(text)
    return [(column.name, column.dtype, tuple(column.shape[:]), column.data) for column in message.columns]


def _walked(data: Payload, rows: Sequence[TokenRow]) -> Iterator[Column]:
    at = num_found = 0
    while at < len(data):
        tag = data[at]
        if tag == _COLUMN_TAG and num_found < len(rows):
            expected = rows[num_found]
            start = at + len(expected.header)
            end = start + expected.num_bytes
            if data[at:start] == expected.header and end <= len(data):
                yield expected.name, expected.dtype, expected.shape, data[start:end]
                num_found += 1
                at = end
                continue
        length, at = read_varint(data, at + 1)
        contents = data[at : at + length]
        if len(contents) < length:
            raise ValueError("cut off")
        at += length
        if tag == _COLUMN_TAG:
            yield _column(contents)
        elif tag in _TEXT_TAGS:
            text = str(contents, "utf-8")
            if tag in _JSON_TAGS:
                from_json(text)
        else:
            raise ValueError(f"the field of the tag {tag}")


def _column(view: Payload) -> Column:
    header = bytes(view[:_HEADER_BYTES])
    dtype_at = 2 + header[1]
    shape_at = dtype_at + 4
    shape_end = shape_at + header[shape_at - 1]
    tags = header[0], header[dtype_at], header[dtype_at + 2]
    if tags != _HEADER_TAGS or max(header[1], header[dtype_at + 1], header[shape_at - 1]) > _ONE_BYTE:
        raise ValueError("a column of other fields")
    shape: list[int] = []
    at = shape_at
    while at < shape_end:
        length, at = read_varint(header, at)
        shape.append(length)
    num_bytes, data_at = (0, at) if at == len(view) else _data(header, at)
    if at != shape_end or data_at + num_bytes != len(view):
        raise ValueError("a column of other fields")
    return header[2:dtype_at].decode(), header[dtype_at + 1], tuple(shape), view[data_at:]


def _data(header: bytes, at: int) -> tuple[int, int]:
    """(length, where the data begins)."""
    if header[at] != _DATA_TAG:
        raise ValueError("a column of other fields")
    return read_varint(header, at + 1)
