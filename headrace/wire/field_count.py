"""Counts the fields of a request before it is parsed.

An empty message costs two bytes on the wire and a hundred in memory, and while protobuf parses millions of them no
other code of the process runs, in any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.wire.checks import require_at_most
from headrace.wire.protobuf import read_varint

_FIELDS_AT_ONCE = 10_000
"""A few milliseconds: others have their turn then."""
_PACKED_BYTES = 4
"""Packed numbers are cheap: this many bytes of them count as one field."""
_FIXED_BYTES = {1: 8, 3: 0, 4: 0, 5: 4}
"""The bytes after the tag, by wire type. The contents of a group are counted as if they stood beside it."""


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Fields of a message type that hold messages, and those that may hold packed numbers."""

    nested: Mapping[int, FieldLayout]
    packed: frozenset[int]


def layout_of(message: Descriptor) -> FieldLayout:
    """The type must not contain itself."""
    nested = {field.number: layout_of(field.message_type) for field in message.fields if field.message_type}
    return FieldLayout(nested, frozenset(field.number for field in message.fields if _is_packable(field)))


def _is_packable(field: FieldDescriptor) -> bool:
    of_bytes = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return field.is_repeated and not field.message_type and field.type not in of_bytes


async def require_few_fields(data: bytes, layout: FieldLayout, most: int) -> None:
    """Raises InvalidArgument for a message of too many fields, nested ones included.

    Bytes that are no message of this layout pass: the parser refuses them after no more fields than were counted.
    """
    if len(data) <= 2 * most:
        return
    for count in _counts(data, layout):
        require_at_most(count, most, "the request, with the messages in it,")
        await asyncio.sleep(0)


def _counts(data: bytes, layout: FieldLayout) -> Iterator[int]:
    """The fields so far, every few thousand of them and at the end."""
    count, pause = 0, _FIELDS_AT_ONCE
    inside = [(layout, 0, len(data))]
    """Messages to be read on: (layout, from where, to where)."""
    while inside:
        layout, at, end = inside.pop()
        with suppress(IndexError, ValueError):  # cut off, or a number without end
            while at < end:
                count += 1
                if count > pause:
                    yield count
                    pause = count + _FIELDS_AT_ONCE
                tag, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                kind = tag & 7
                if kind == 0:
                    _, at = read_varint(data, at)
                elif kind != 2:
                    at += _FIXED_BYTES.get(kind, end)  # to the end where there is no such type
                else:
                    length, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                    if tag >> 3 in layout.packed:
                        count += length // _PACKED_BYTES
                    elif length and tag >> 3 in layout.nested:
                        inside += (layout, at + length, end), (layout.nested[tag >> 3], at, min(at + length, end))
                        break
                    at += length
    yield count
