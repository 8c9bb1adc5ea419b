"""A connection to SQLite that fails at a named point, `NAME:ACTION:N`: the real one, told by the system that it cannot.

Points: begin (before a transaction), commit (everything of it written, not committed), committed.
Actions: kill and pause as in `faulty_files`; EIO (no file of the process may grow any more, which SQLite reports as an
I/O error) and ENOSPC (no page is left, until that was met once), both met in the middle of the transaction that
follows.
"""

from __future__ import annotations

import os
import resource
import sqlite3
from pathlib import Path
from typing import Any

from services.buffer.store.sqlite import connect
from tests.support.faults.failpoint import Failpoint

DATABASE_FAILPOINTS = (
    ("begin", "kill"), ("begin", "EIO"), ("begin", "ENOSPC"), ("begin", "pause"),
    ("commit", "kill"), ("commit", "EIO"), ("commit", "pause"), ("committed", "kill"), ("committed", "pause"),
)  # fmt: skip
_MANY_PAGES = 1 << 30
_AFTER = {"COMMIT": "committed"}
_BEFORE = {"BEGIN IMMEDIATE": "begin", "COMMIT": "commit"}


def connect_faulty(path: Path, failpoint: str) -> sqlite3.Connection:
    """One fault."""
    connection = connect(path, _FaultyConnection)
    assert isinstance(connection, _FaultyConnection)
    connection.failpoint = Failpoint(failpoint)
    assert (connection.failpoint.point, connection.failpoint.action) in DATABASE_FAILPOINTS, failpoint
    connection.path = path
    return connection


class _FaultyConnection(sqlite3.Connection):
    failpoint: Failpoint | None = None
    path: Path

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        self._pass(_BEFORE.get(sql))
        try:
            cursor = super().execute(sql, *parameters)
        except sqlite3.OperationalError:
            super().execute(f"PRAGMA max_page_count = {_MANY_PAGES}")  # somebody has made room
            raise
        self._pass(_AFTER.get(sql))
        return cursor

    def _pass(self, point: str | None) -> None:
        if self.failpoint is None or point is None:
            return
        match self.failpoint.passes(point):
            case "EIO":
                size = os.path.getsize(f"{self.path}-wal")
                resource.setrlimit(resource.RLIMIT_FSIZE, (min(size, 4096), resource.RLIM_INFINITY))
            case "ENOSPC":
                (num_pages,) = super().execute("PRAGMA page_count").fetchone()
                super().execute(f"PRAGMA max_page_count = {num_pages}")
