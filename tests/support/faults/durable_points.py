"""A SQLite store that tells of every point at which a kill could come: before, in and after each durable operation.

What a kill leaves at a point is the folder as it is then: the kernel keeps what was written. `image` copies it.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.buffer.store.files import Buffer, DiskFiles
from services.buffer.store.sqlite.database import connect
from services.buffer.store.sqlite.store import SqliteStore

OnPoint = Callable[[str], None]


def open_told(folder: Path, on_point: OnPoint, *, file_bytes: int = 4096) -> SqliteStore:
    """The store of a folder."""
    return SqliteStore(
        folder,
        file_bytes=file_bytes,
        open_files=partial(_ToldFiles, on_point=on_point),
        connect_writer=partial(_connect_told, on_point=on_point),
    )


def image(folder: Path, target: Path) -> Path:
    """What a kill would leave now."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("lock", "*-shm", "copy-*"))
    return target


class _ToldFiles(DiskFiles):
    def __init__(self, folder: Path, on_point: OnPoint) -> None:
        super().__init__(folder)
        self._on_point = on_point

    def create(self, name: str) -> None:
        self._on_point("create")
        super().create(name)
        self._on_point("created")

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        self._on_point("write")
        whole = b"".join(parts)
        super().write(name, offset, [whole[: len(whole) // 2]])
        self._on_point("half-written")
        super().write(name, offset, parts)
        self._on_point("written")

    def sync(self, name: str) -> None:
        super().sync(name)
        self._on_point("synced")

    def sync_folder(self) -> None:
        super().sync_folder()
        self._on_point("folder-synced")

    def truncate(self, name: str, num_bytes: int) -> None:
        super().truncate(name, num_bytes)
        self._on_point("truncated")

    def delete(self, name: str) -> None:
        self._on_point("delete")
        super().delete(name)
        self._on_point("deleted")


class _ToldConnection(sqlite3.Connection):
    on_point: OnPoint = staticmethod(lambda _: None)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            self.on_point("commit")
        cursor = super().execute(sql, *parameters)
        if sql == "COMMIT":
            self.on_point("committed")
        return cursor


def _connect_told(path: Path, on_point: OnPoint) -> sqlite3.Connection:
    connection = connect(path, _ToldConnection)
    assert isinstance(connection, _ToldConnection)
    connection.on_point = on_point  # type: ignore[method-assign]
    return connection
