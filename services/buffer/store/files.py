"""The file operations that payload files need. `DiskFiles` is real; tests have recording and failing twins.

A name is durable after `sync_folder`, contents after `sync`. After an OSError it is unknown what the kernel stored, so
that file is not written again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.buffer.store.direct_io import Buffer, DirectIo, is_refusal, open_direct

__all__ = ["Buffer", "DiskFiles", "Files", "sync_folder"]

_IOV_MAX = 1024
LARGE_BYTES = 128 << 10
"""Payloads of this size or more are written and read past the page cache."""


class Files(Protocol):
    """One folder of files that are appended to and read anywhere."""

    def names(self) -> list[str]:
        """Returns the names, sorted."""

    def create(self, name: str) -> None:
        """Creates an empty file."""

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        """Writes the parts one after the other."""

    def sync(self, name: str) -> None:
        """Makes the file's contents survive power loss."""

    def sync_folder(self) -> None:
        """Makes names created and deleted so far survive power loss."""

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Reads at most `num_bytes`; fewer at the end of the file. Raises FileNotFoundError."""

    def size(self, name: str) -> int:
        """Returns the size in bytes."""

    def truncate(self, name: str, num_bytes: int) -> None:
        """Cuts the file to `num_bytes`."""

    def delete(self, name: str) -> None:
        """Deletes the name; open readers go on."""

    def free_bytes(self) -> int:
        """Returns the free space of the disk."""

    def close(self) -> None:
        """Ends it: no other method may be called afterwards."""


class _Open:
    """An open file. It is closed once no reader uses it, which may be after its name was deleted."""

    def __init__(self, path: Path, flags: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
        self._past_cache = self.direct = open_direct(path)
        """`direct` is None where the file system cannot pass the page cache by."""

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
        if hasattr(self, "_past_cache") and self._past_cache is not None:
            os.close(self._past_cache)


class DiskFiles:
    """Keeps files open. Several threads may read at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open: dict[str, _Open] = {}
        self._direct_io = DirectIo()

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def create(self, name: str) -> None:
        self._open[name] = _Open(self._folder / name, os.O_CREAT | os.O_EXCL)

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        file = self._file(name)
        if file.direct is not None and max(map(len, parts), default=0) >= LARGE_BYTES:
            try:
                return self._direct_io.write(file.descriptor, file.direct, offset, parts)
            except OSError as error:
                if not is_refusal(error):
                    raise
                file.direct = None
        for first in range(0, len(parts), _IOV_MAX):
            offset += _write_all(file.descriptor, offset, parts[first : first + _IOV_MAX])
        return None

    def sync(self, name: str) -> None:
        os.fdatasync(self._file(name).descriptor)

    def sync_folder(self) -> None:
        sync_folder(self._folder)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        file = self._file(name)
        if file.direct is not None and num_bytes >= LARGE_BYTES:
            try:
                return self._direct_io.read(file.direct, offset, num_bytes)
            except OSError as error:
                if not is_refusal(error):
                    raise
        return os.pread(file.descriptor, num_bytes, offset)

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def truncate(self, name: str, num_bytes: int) -> None:
        os.truncate(self._folder / name, num_bytes)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()
        self._open.pop(name, None)

    def free_bytes(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        self._open.clear()

    def _file(self, name: str) -> _Open:
        file = self._open.get(name)
        return file or self._open.setdefault(name, _Open(self._folder / name, 0))


def sync_folder(folder: Path) -> None:
    """Makes names created and deleted in the folder so far survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, offset: int, parts: Sequence[Buffer]) -> int:
    total = sum(len(part) for part in parts)
    written = os.pwritev(descriptor, parts, offset)
    if written < total:  # a signal, or a disk that is nearly full: the rest in one piece
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            count = os.pwrite(descriptor, rest, offset + written)
            rest, written = rest[count:], written + count
    return total
