"""A consistent copy of a store's files, stored beside them while it is read."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "copy-"


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """`num_bytes` of the file at `path`; `name` is relative to the ledger's folder."""

    name: str
    path: Path
    num_bytes: int


@contextmanager
def copy_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder on the ledger's disk, and deletes it afterwards."""
    copy = folder / f"{_PREFIX}{secrets.token_hex(4)}"
    copy.mkdir()
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def delete_leftovers(folder: Path) -> None:
    """Deletes copies that a killed process left behind. Only the process that owns the folder may call it."""
    for copy in folder.glob(f"{_PREFIX}*"):
        shutil.rmtree(copy)


def files_of(copy: Path) -> Sequence[CopiedFile]:
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    return [CopiedFile(str(path.relative_to(copy)), path, path.stat().st_size) for path in paths]
