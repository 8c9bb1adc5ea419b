"""The locations of payloads. One command's payloads of a group are one extent: consecutive records in one file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from services.buffer.store.sqlite.payload_record import record_bytes


class StoredPayload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One record of an extent; `crc` is the one in its header."""

    key: str
    payload_bytes: int
    crc: int

    @property
    def record_bytes(self) -> int:
        """The length of the record with its header and key."""
        return record_bytes(self.key.encode(), self.payload_bytes)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """One row of the table `payloads`."""

    file_id: bytes
    offset: int
    payloads: tuple[StoredPayload, ...]
    num_bytes: int
    """The length of all its records."""

    @property
    def place(self) -> tuple[bytes, int]:
        """Identifies the extent by file and offset."""
        return self.file_id, self.offset

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return self.offset + self.num_bytes

    def offsets(self) -> list[int]:
        """Returns the offset of each record."""
        lengths = (payload.record_bytes for payload in self.payloads[:-1])
        return list(accumulate(lengths, initial=self.offset))


class Extents:
    """All extents that rows name. One thread changes them at a time; any may read."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._of_key: dict[str, tuple[Extent, int]] = {}
        self._of_file: defaultdict[bytes, dict[int, Extent]] = defaultdict(dict)
        self._live_bytes: Counter[bytes] = Counter()
        self._num_live: Counter[tuple[bytes, int]] = Counter()
        for extent in extents:
            self.add(extent)

    def find(self, key: str) -> tuple[Extent, int] | None:
        """Returns the extent that has a payload, and its number there; None for a deleted payload."""
        return self._of_key.get(key)

    def add(self, extent: Extent) -> None:
        """Adds an extent that a row names."""
        self._of_file[extent.file_id][extent.offset] = extent
        self._live_bytes[extent.file_id] += extent.num_bytes
        self._num_live[extent.place] = len(extent.payloads)
        for i, payload in enumerate(extent.payloads):
            self._of_key[payload.key] = extent, i

    def drop(self, key: str) -> Extent | None:
        """Removes a payload. Returns its extent when it was the last one in there."""
        found = self._of_key.pop(key, None)
        if found is None:
            return None
        extent, _ = found
        self._num_live[extent.place] -= 1
        if self._num_live[extent.place]:
            return None
        self._remove(extent)
        return extent

    def move(self, old: Extent, new: Extent) -> None:
        """Replaces an extent after its row was changed."""
        live = {payload.key for payload in old.payloads if payload.key in self._of_key}
        self._remove(old)
        self.add(new)
        for payload in new.payloads:
            if payload.key not in live:
                self.drop(payload.key)

    def is_live(self, extent: Extent) -> bool:
        """True while a row names the extent at that location."""
        return self._of_file.get(extent.file_id, {}).get(extent.offset) is extent

    def all(self) -> list[Extent]:
        """Returns all extents, file by file, in order."""
        return [extent for file_id in self.file_ids for extent in self.of_file(file_id)]

    def of_file(self, file_id: bytes) -> list[Extent]:
        """Returns the file's extents in order."""
        extents = self._of_file.get(file_id, {})
        return [extent for offset in sorted(extents) if (extent := extents.get(offset))]

    def live_bytes(self, file_id: bytes) -> int:
        """Counts the bytes of the file's records that rows name."""
        return self._live_bytes[file_id]

    @property
    def file_ids(self) -> set[bytes]:
        return set(self._of_file)

    def _remove(self, extent: Extent) -> None:
        of_file = self._of_file[extent.file_id]
        del of_file[extent.offset]
        self._live_bytes[extent.file_id] -= extent.num_bytes
        del self._num_live[extent.place]
        if not of_file:
            del self._of_file[extent.file_id], self._live_bytes[extent.file_id]
