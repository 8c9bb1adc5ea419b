"""A SQLite store that tells of every point at which a kill could come: before, in and after each durable operation.

What a kill leaves at a point is the folder as it is then: the kernel keeps what was written. `image` copies it.
"""

from __future__ import annotations

import shutil
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

from services.buffer.store.sqlite import SqliteStore, connect
from tests.support.faults.told_files import OnPoint, ToldFiles


def open_told(folder: Path, on_point: OnPoint, *, large_call_bytes: int = 1000) -> SqliteStore:
    """The store of a folder."""
    return SqliteStore(
        folder,
        large_call_bytes=large_call_bytes,
        open_files=partial(ToldFiles, on_point=on_point),
        connect_writer=partial(_connect_told, on_point=on_point),
    )


def image(folder: Path, target: Path) -> Path:
    """What a kill would leave now."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("lock", "*-shm", "copy-*"))
    return target


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
