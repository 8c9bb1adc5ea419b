"""The segments of one folder: records are appended to the youngest, and a batch is durable when `append` returns.

A process writes only to segments that it made: the youngest of an earlier one is cut behind its last whole batch and
kept as it is. Names are number and salt, `00000001-89abcdef.segment`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from services.buffer.store.files import Buffer, Files
from services.buffer.store.segment_record import HEADER_BYTES, RecordType, header, read_record

_NAME = re.compile(r"(\d{8})-([0-9a-f]{8})\.segment")
_LOOK_BYTES_FRACTION = 1 / 64
_LEAST_LOOK_BYTES = 64
"""An END, the last record of a batch, has fewer zeros at its end: a dozen at most."""


class Location(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int


class SegmentLog:
    """`append` is called by one thread at a time, `read` by any."""

    def __init__(self, files: Files, segment_bytes: int) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._look_bytes = max(int(segment_bytes * _LOOK_BYTES_FRACTION), _LEAST_LOOK_BYTES)
        self._names = {int(m[1]): name for name in files.names() if (m := _NAME.fullmatch(name))}
        self._active = 0
        self._offset = 0
        self._capacity = 0
        self.next_number = 1

    @property
    def segments(self) -> list[int]:
        """Oldest first."""
        return sorted(self._names)

    @property
    def active(self) -> int:
        """The one that is written to; 0 before the first."""
        return self._active

    @property
    def end(self) -> Location:
        """Where the next record goes."""
        return Location(self._active, self._offset)

    def salt(self, segment: int) -> int:
        """What its checksums start from."""
        return _salt(self._names[segment])

    def contents(self, segment: int, start: int = 0) -> bytes:
        """From `start` on, without most of the zeros at the end: so many stay that no record ends in those left out."""
        name, step = self._names[segment], self._look_bytes
        size = end = self._files.size(name)
        while end - step > start and _is_zeros(self._files.read(name, end - step, step)):
            end -= step
        return self._files.read(name, start, max(min(end + step, size) - start, 0))

    def num_bytes(self, segment: int) -> int:
        """Its size on the disk."""
        return self._files.size(self._names[segment])

    def read(self, location: Location, body_bytes: int) -> memoryview | None:
        """A record's body; None when the segment is gone or no whole record of that length lies there."""
        name = self._names.get(location.segment)
        if name is None:
            return None
        try:
            data = self._files.read(name, location.offset, HEADER_BYTES + body_bytes)
        except FileNotFoundError:
            return None
        record = read_record(memoryview(data), 0, _salt(name))
        return record.body if record and len(record.body) == body_bytes else None

    def append(self, bodies: Sequence[tuple[RecordType, Buffer]]) -> list[Location]:
        """Durable when it returns. Raises OSError, after which nobody knows what is on the disk."""
        num_bytes = sum(HEADER_BYTES + len(body) for _, body in bodies)
        if self._active == 0 or self._offset + num_bytes > self._capacity:
            self._rotate(num_bytes)
        locations, parts, offset = [], list[Buffer](), self._offset
        salt = self.salt(self._active)
        for number, (record_type, body) in enumerate(bodies, self.next_number):
            locations.append(Location(self._active, offset))
            parts += (header(number, record_type, body, salt), body)
            offset += HEADER_BYTES + len(body)
        name = self._names[self._active]
        self._files.write(name, self._offset, parts)
        self._files.sync(name)
        self._offset = offset
        self.next_number += len(bodies)
        return locations

    def open_segment(self, ledger_id: str) -> None:
        """A fresh one, which begins with the ledger's id and the number of the record that follows."""
        self._ledger_id = ledger_id
        self._rotate(0)

    def cut(self, segment: int, num_bytes: int) -> None:
        """Makes what is before `num_bytes` durable and takes away the rest."""
        name = self._names[segment]
        if self._files.size(name) != num_bytes:
            self._files.truncate(name, num_bytes)
        self._files.sync(name)

    def delete(self, segment: int) -> None:
        """Gone, once its name is."""
        self._files.delete(self._names.pop(segment))
        self._files.sync_folder()

    def seal(self) -> None:
        """Gives the blocks behind the last record back."""
        if self._active:
            self.cut(self._active, self._offset)

    def _rotate(self, num_bytes: int) -> None:
        self.seal()
        self._active = max(self._names, default=0) + 1
        name = f"{self._active:08d}-{secrets.token_hex(4)}.segment"
        body = self._ledger_id.encode()
        first = header(self.next_number, RecordType.OPENED, body, _salt(name))
        self._offset = len(first) + len(body)
        self._capacity = max(self._segment_bytes, self._offset + num_bytes)
        self._files.create(name, self._capacity)
        self._files.write(name, 0, [first, body])
        self._files.sync(name)
        self._files.sync_folder()
        self._names[self._active] = name


def _is_zeros(data: bytes) -> bool:
    return data == bytes(len(data))


def _salt(name: str) -> int:
    return int(name[9:17], 16)
