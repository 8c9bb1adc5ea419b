"""A record of a segment: header (magic, length, CRC-32C, type, number), then the body.

The CRC covers header and body and starts from the segment's salt, which is in the segment's name: bytes that a producer
put, or that an older file left on the disk, are never taken for a record. Numbers rise by one through all segments.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from crc32c import crc32c

from services.buffer.store.files import Buffer

MAGIC = b"hrS1"
_HEADER = struct.Struct("<4sIIIQ")
_CHECKED = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size


class RecordType(IntEnum):
    """What a body is."""

    OPENED = 1
    """First of a segment: the ledger's id. Has the number of the record that follows."""
    TRANSACTION = 2
    """Rows, and the keys of the payloads that follow, one PAYLOAD record each."""
    PAYLOAD = 3
    """The bytes of one payload."""
    END = 4
    """Last of what was committed together: which groups and streams it changed."""


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record; `offset` is its header's."""

    offset: int
    number: int
    type: RecordType
    body: memoryview

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + HEADER_BYTES + len(self.body)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no record, and not zeros."""

    offset: int
    num_bytes: int


def header(number: int, record_type: RecordType, body: Buffer, salt: int) -> bytes:
    """What goes in front of a body."""
    crc = crc32c(body, crc32c(_CHECKED.pack(len(body), record_type, number), salt))
    return _HEADER.pack(MAGIC, len(body), crc, record_type, number)


def read_record(data: memoryview, offset: int, salt: int, base: int = 0) -> Record | None:
    """None unless a whole record starts there. `data` begins `base` bytes behind the segment's start."""
    if offset + HEADER_BYTES > len(data):
        return None
    magic, length, crc, record_type, number = _HEADER.unpack_from(data, offset)
    start = offset + HEADER_BYTES
    if magic != MAGIC or start + length > len(data):
        return None
    body = data[start : start + length]
    if crc32c(body, crc32c(_CHECKED.pack(length, record_type, number), salt)) != crc:
        return None
    return Record(base + offset, number, RecordType(record_type), body)


def scan(data: bytes, salt: int, base: int = 0) -> Iterator[Record | Damage]:
    """Every record of a segment from its byte `base` on, where `data` begins, and what lies between them.

    Zeros at the end are passed over.
    """
    view = memoryview(data)
    at = 0
    while at < len(data):
        record = read_record(view, at, salt, base)
        if record is None:
            following = _next_record(data, view, at + 1, salt, base)
            end = following.offset - base if following else len(data.rstrip(b"\0"))
            if end > at:
                yield Damage(base + at, end - at)
            if following is None:
                return
            record = following
        yield record
        at = record.end - base


def _next_record(data: bytes, view: memoryview, start: int, salt: int, base: int) -> Record | None:
    while (start := data.find(MAGIC, start)) >= 0:
        record = read_record(view, start, salt, base)
        if record:
            return record
        start += 1
    return None
