"""Protobuf's encoding: the numbers and fields of a message as bytes, without its generated class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

Payload = bytes | memoryview
"""A memoryview is a slice of the request it came in, or of the record it was read from."""


@lru_cache(1 << 14)
def varint(value: int) -> bytes:
    """A number as protobuf writes it, seven bits at a time."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, data: bytes) -> bytes:
    """A field of bytes, a string or a message, as it stands in a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(data: Payload, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, where the field starts, where its contents do, where both end).

    A tag is number and wire type: a field of another type than its own is an unknown one. Raises ValueError or
    IndexError for what is not protobuf.
    """
    while at < end:
        start = at
        tag, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
        contents = at
        match tag & 7:
            case 2:  # bytes
                length, contents = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                at = contents + length
            case 0:  # a number
                _, at = read_varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("cut off")
        if not 8 <= tag < 1 << 32:
            raise ValueError(f"tag {tag}")
        yield tag, start, contents, at


def read_varint(data: Payload, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number without end")
