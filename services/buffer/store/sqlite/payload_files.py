"""Payloads in append-only files, `payloads/ID.payloads`.

After `append` they are on the disk, but no row names them yet. A process writes only to files that it created: those of
an earlier one are cut behind the last extent that a row names, and are then only read. Bytes that no row names do not
count.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from services.buffer.store.files import Buffer, Files
from services.buffer.store.sqlite.extent import Extent, StoredPayload
from services.buffer.store.sqlite.payload_record import (
    FILE_HEADER_BYTES,
    FILE_ID_BYTES,
    file_header,
    is_header_of,
    read_record,
    record_header,
)

_NAME = re.compile(r"([0-9a-f]{32})\.payloads")
NewExtent = Sequence[tuple[str, Buffer]]
"""Keys and payloads that come and go together."""


class PayloadFiles:
    """Any thread may call any method; appends wait for each other."""

    def __init__(self, files: Files, file_bytes: int) -> None:
        self._files = files
        self._file_bytes = file_bytes
        self._appending = threading.Lock()
        self._active: bytes | None = None
        self._end = 0
        self._num_unnamed: Counter[bytes] = Counter()
        """Extents of each file that were appended, and wait for the transaction that names them."""

    def is_open(self, file_id: bytes) -> bool:
        """True while the file may get payloads, or some wait for their row. It must not be emptied or deleted."""
        return file_id == self._active or self._num_unnamed[file_id] > 0

    @contextmanager
    def still(self) -> Iterator[tuple[bytes | None, int]]:
        """Stops all writes inside. Yields (the file that is written to, its length)."""
        with self._appending:
            yield self._active, self._end

    def file_ids(self) -> set[bytes]:
        """Returns the ids of the files that exist."""
        return {bytes.fromhex(m[1]) for name in self._files.names() if (m := _NAME.fullmatch(name))}

    def append(self, extents: Sequence[NewExtent]) -> list[Extent]:
        """Returns once everything is durable. After an OSError nothing counts; the next append starts a new file."""
        with self._appending:
            placed = self._append(extents)
            self._num_unnamed.update(extent.file_id for extent in placed)
        return placed

    def note_named(self, extents: Sequence[Extent]) -> None:
        """Notes that rows name these extents now, or never will."""
        with self._appending:
            for extent in extents:
                self._num_unnamed[extent.file_id] -= 1
                if not self._num_unnamed[extent.file_id]:
                    del self._num_unnamed[extent.file_id]

    def _append(self, extents: Sequence[NewExtent]) -> list[Extent]:
        active = self._active if self._end < self._file_bytes else None
        is_new = active is None
        file_id, start = active or secrets.token_bytes(FILE_ID_BYTES), 0 if is_new else self._end
        self._active, self._end = file_id, start
        parts: list[Buffer] = [file_header(file_id)] if is_new else []
        self._end += FILE_HEADER_BYTES if is_new else 0
        placed = [self._place(file_id, extent, parts) for extent in extents]
        try:
            self._write(file_id, start, parts, is_new=is_new)
        except OSError:
            self._active = None
            self._take_back(file_id, start)
            raise
        return placed

    def _write(self, file_id: bytes, start: int, parts: Sequence[Buffer], *, is_new: bool) -> None:
        if is_new:
            self._files.create(file_name(file_id))
        self._files.write(file_name(file_id), start, parts)
        self._files.sync(file_name(file_id))
        if is_new:
            self._files.sync_folder()

    def _take_back(self, file_id: bytes, start: int) -> None:
        """Frees the space of a refused write. If that fails, the bytes stay and no row names them."""
        with suppress(OSError):
            if start:
                self._files.truncate(file_name(file_id), start)
            else:
                self._files.delete(file_name(file_id))

    def _place(self, file_id: bytes, extent: NewExtent, parts: list[Buffer]) -> Extent:
        stored: list[StoredPayload] = []
        num_bytes = 0
        for key, payload in extent:
            header, crc = record_header(file_id, key.encode(), payload)
            parts += header, payload
            num_bytes += len(header) + len(payload)
            stored.append(StoredPayload(key, len(payload), crc))
        placed = Extent(file_id, self._end, tuple(stored), num_bytes)
        self._end = placed.end
        return placed

    def copy(self, extents: Sequence[Extent]) -> list[tuple[Extent, Extent]]:
        """Returns (old, new) for every undamaged extent; the new one is durable, and no row names it yet."""
        whole = [(extent, payloads) for extent in extents if (payloads := self._read_all(extent)) is not None]
        keys = [[payload.key for payload in extent.payloads] for extent, _ in whole]
        new = [list(zip(names, payloads, strict=True)) for names, (_, payloads) in zip(keys, whole, strict=True)]
        return list(zip([extent for extent, _ in whole], self.append(new) if new else [], strict=True))

    def _read_all(self, extent: Extent) -> list[memoryview] | None:
        payloads = [self.try_read(extent, number) for number in range(len(extent.payloads))]
        whole = [payload for payload in payloads if payload is not None]
        return whole if len(whole) == len(payloads) else None

    def try_read(self, extent: Extent, number: int) -> memoryview | None:
        """Returns a payload of an extent, or None when it is damaged or gone."""
        payload, offset = extent.payloads[number], extent.offsets()[number]
        try:
            data = self._files.read(file_name(extent.file_id), offset, payload.record_bytes)
        except FileNotFoundError:
            return None
        return read_record(memoryview(data), extent.file_id, payload.key.encode(), payload.payload_bytes, payload.crc)

    def damage_of(self, file_id: bytes, end: int) -> str | None:
        """Says what is wrong with a file that rows name up to `end`, or returns None. It does not read the records."""
        name = file_name(file_id)
        try:
            size, header = self._files.size(name), self._files.read(name, 0, FILE_HEADER_BYTES)
        except FileNotFoundError:
            return f"payloads/{name} is missing"
        if not is_header_of(file_id, header):
            return f"payloads/{name} has another file's header, or a damaged one"
        return f"payloads/{name} has {size} bytes, and had {end}" if size < end else None

    def cut(self, file_id: bytes, end: int) -> int:
        """Cuts off everything behind `end`; returns the number of bytes."""
        surplus = max(self._files.size(file_name(file_id)) - end, 0)
        if surplus:
            self._files.truncate(file_name(file_id), end)
        return surplus

    def num_bytes(self, file_id: bytes) -> int:
        """Returns the file's size on the disk."""
        return self._files.size(file_name(file_id))

    def delete(self, file_id: bytes) -> None:
        """Deletes a file that no row names. A power loss may restore it, still unnamed."""
        self._files.delete(file_name(file_id))

    def close(self) -> None:
        """Ends it: no other method may be called afterwards."""
        self._files.close()


def file_name(file_id: bytes) -> str:
    return f"{file_id.hex()}.payloads"
