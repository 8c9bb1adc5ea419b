"""The file of one column, which has its name, the SHA-256 of its bytes, once all of it is on the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from headrace.errors import DataLoss, InvalidArgument
from services.buffer.store.files import sync_folder

PART = ".part"
"""What the name of an unfinished file ends with."""
FileState = tuple[int, int, int]
"""(inode, bytes, change time in ns): other bytes in the file change it."""


def state_of(path: Path) -> FileState | None:
    """Returns None where there is no file. Blocks."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_ctime_ns


def has_digest(path: Path) -> bool:
    """True when the file's bytes have the SHA-256 in its name. Blocks. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == path.name


def append(path: Path, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
    """Returns (next offset, True once all `num_bytes` are durable under `path`). Blocks.

    A chunk behind the end of the file changes nothing, and what the file has already is not written again. Raises
    InvalidArgument for more bytes than `num_bytes`, and DataLoss for others than the name says, which are deleted.
    """
    part = path.with_suffix(PART)
    with part.open("ab") as file:
        size = file.tell()
        if offset > size or not (data or size == num_bytes):
            return size, False
        new = data[size - offset :]
        if size + len(new) > num_bytes:
            raise InvalidArgument(
                f"column {path.name[:16]}… was announced with {num_bytes} bytes, but {size + len(new)} came",
                field="num_bytes",
            )
        file.write(new)
        file.flush()
        if size + len(new) < num_bytes:
            return size + len(new), False
        os.fdatasync(file.fileno())
    _finish(part, path)
    return num_bytes, True


def _finish(part: Path, path: Path) -> None:
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != path.name:
        part.unlink()
        raise DataLoss(f"the column's bytes have the SHA-256 {found[:16]}…, not {path.name[:16]}…")
    part.rename(path)
    sync_folder(path.parent)
