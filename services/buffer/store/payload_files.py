"""Payloads of large calls: one file for each call, `payloads/ID.payloads`, deleted when no row names it.

A file is written and synced before the transaction that names it. A start deletes files that no row names.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.disk import sync
from headrace.protobuf import Payload
from headrace.rpc.log import log

_NAME = re.compile(r"[0-9a-f]{32}\.payloads")
_IOV_MAX = 1024


class PayloadPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a payload lies. Its checksum is its digest, in the row of its sample."""

    file: str
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


Placed = list[dict[str, PayloadPlace]]
"""For each call: the places of its payloads by key."""


class DiskFiles:
    """One folder of files that are written once. Several threads may call it at once.

    A name is durable after `sync_folder`, contents after `sync`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def create(self, name: str) -> None:
        (self._folder / name).touch(exist_ok=False)

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        """Writes the parts one after the other from the file's start."""
        with (self._folder / name).open("r+b", buffering=0) as file:
            for first in range(0, len(parts), _IOV_MAX):
                some = parts[first : first + _IOV_MAX]
                written = os.writev(file.fileno(), some)
                if written < sum(map(len, some)):  # a signal, or a disk that is nearly full
                    rest = memoryview(b"".join(some))[written:]
                    while rest:
                        rest = rest[file.write(rest) :]

    def sync(self, name: str) -> None:
        with (self._folder / name).open("rb") as file:
            os.fdatasync(file.fileno())

    def sync_folder(self) -> None:
        sync(self._folder)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Reads at most `num_bytes`; fewer at the end of the file. Raises FileNotFoundError."""
        with (self._folder / name).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), num_bytes, offset)

    def size(self, name: str) -> int:
        """Raises FileNotFoundError."""
        return (self._folder / name).stat().st_size

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()

    def free_bytes(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize


class PayloadFiles:
    """`write` may be called beside any other method; those that change what is named, by one thread."""

    def __init__(self, files: DiskFiles, retry: Callable[[Callable[[], Placed]], Placed]) -> None:
        """`retry` repeats a write that stored nothing while the disk is full."""
        self._files = files
        self._retry = retry
        self._places: dict[str, PayloadPlace] = {}
        self._num_named: Counter[str] = Counter()

    def write(self, calls: Sequence[Mapping[str, Payload]]) -> Placed:
        """Writes a file for each call and returns once all are durable."""
        return self._retry(lambda: self._write(calls))

    def _write(self, calls: Sequence[Mapping[str, Payload]]) -> Placed:
        """After an OSError no file is there."""
        places: Placed = []
        names: list[str] = []
        try:
            for payloads in calls:
                names.append(f"{secrets.token_hex(16)}.payloads")
                self._files.create(names[-1])
                self._files.write(names[-1], list(payloads.values()))
                self._files.sync(names[-1])
                places.append(_places(names[-1], payloads))
            self._files.sync_folder()
        except OSError:
            for name in names:
                with suppress(OSError):
                    self._files.delete(name)
            raise
        return places

    def name(self, places: Mapping[str, PayloadPlace]) -> None:
        """Notes that rows name these payloads now."""
        self._places.update(places)
        self._num_named.update(place.file for place in places.values())

    def drop(self, keys: Sequence[str]) -> None:
        """Notes that no row names these payloads any more, and deletes files of which that was the last."""
        for key in keys:
            if (place := self._places.pop(key, None)) is None:
                continue
            self._num_named[place.file] -= 1
            if not self._num_named[place.file]:
                del self._num_named[place.file]
                self._delete(place.file)

    def sweep(self) -> int:
        """Deletes files that no row names; returns their bytes."""
        unnamed = [name for name in self._files.names() if _NAME.fullmatch(name) and name not in self._num_named]
        num_bytes = sum(map(self._files.size, unnamed))
        for name in unnamed:
            self._files.delete(name)
        return num_bytes

    def _delete(self, name: str) -> None:
        """A file that cannot be deleted now is deleted by the next start."""
        try:
            self._files.delete(name)
        except OSError as error:
            log.warning("payload_file_kept", file=name, error=str(error))

    def find(self, key: str) -> PayloadPlace | None:
        return self._places.get(key)

    def keys(self) -> set[str]:
        return set(self._places)

    def names(self) -> list[str]:
        return list(self._num_named)

    def read(self, place: PayloadPlace) -> bytes | None:
        """Returns None where the file is gone or short."""
        try:
            data = self._files.read(place.file, place.offset, place.num_bytes)
        except FileNotFoundError:
            return None
        return data if len(data) == place.num_bytes else None

    def lacking(self) -> dict[str, str]:
        """Returns (key → what is wrong) for payloads whose file is gone or too short. It does not read them."""
        sizes = {name: self._size(name) for name in self._num_named}
        return {
            key: f"payloads/{place.file} is missing" if size is None else f"payloads/{place.file} has {size} bytes"
            for key, place in self._places.items()
            if (size := sizes[place.file]) is None or size < place.end
        }

    def _size(self, name: str) -> int | None:
        try:
            return self._files.size(name)
        except FileNotFoundError:
            return None


def _places(name: str, payloads: Mapping[str, Payload]) -> dict[str, PayloadPlace]:
    places, offset = dict[str, PayloadPlace](), 0
    for key, payload in payloads.items():
        places[key] = PayloadPlace(name, offset, len(payload))
        offset += len(payload)
    return places
