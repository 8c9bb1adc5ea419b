"""`ledger.sqlite`: the only truth. WAL, synchronous=FULL, every row with a CRC-32C over its key and body.

Many rows go into one statement, so that SQLite runs without the GIL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from crc32c import crc32c

from headrace import __version__
from headrace.errors import ConfigError, DataLoss

FILE = "ledger.sqlite"
LAYOUT = 3
"""The version of tables and rows; another one is refused. A field that is added with a default is no other one."""
_VERSION = "headrace"
"""The key of the release that opened the ledger last."""
TABLES = {
    "meta": "(key TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID",
    "streams": "(name TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID",
    "prompts": "(group_id TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)",
    "groups": "(group_id TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID",
    "samples": "(key TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)",
    "payloads": (
        "(file_id BLOB NOT NULL, offset INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL, "
        "PRIMARY KEY (file_id, offset)) WITHOUT ROWID"
    ),
    "events": "(position INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)",
}
_SCHEMA = "BEGIN IMMEDIATE;" + "".join(f"CREATE TABLE {name} {columns};" for name, columns in TABLES.items())
_SCHEMA += f"PRAGMA user_version = {LAYOUT}; COMMIT;"
_ROWS_PER_STATEMENT = 256
_PAGE_CACHE_KIB = 4 << 10
"""Of each connection. The pages that commits touch again are few: a larger one is no faster, and fills for hours."""


def open_database(path: Path, connect: Callable[[Path], sqlite3.Connection], *, may_be_new: bool) -> sqlite3.Connection:
    """Creates missing tables. Raises ConfigError for another layout, DataLoss when the file is gone or empty."""
    if not (may_be_new or path.exists()):
        raise DataLoss(
            f"{path} is gone, and the files beside it cannot be read without it (put it back if you have it)"
        )
    connection = connect(path)
    try:
        (layout,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        if num_tables and layout != LAYOUT:
            raise _another_layout(path, layout, _version_in(connection))
        if not num_tables and not may_be_new:
            raise DataLoss(f"{path} is empty, or its log ({FILE}-wal) is gone (put it back if you have it)")
        if not num_tables:
            connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def note_version(connection: sqlite3.Connection) -> None:
    """Writes which release has opened the ledger, for a refusal to name it."""
    body = __version__.encode()
    if _version_in(connection) != __version__:
        connection.execute("REPLACE INTO meta VALUES (?, ?, ?)", (_VERSION, body, checksum(_VERSION, body)))


def _version_in(connection: sqlite3.Connection) -> str | None:
    """None where it is not written, as in ledgers of 0.1.0, or cannot be read."""
    try:
        row = connection.execute("SELECT body, crc FROM meta WHERE key = ?", (_VERSION,)).fetchone()
    except sqlite3.Error:
        return None
    is_whole = row is not None and isinstance(row[0], bytes) and checksum(_VERSION, row[0]) == row[1]
    return row[0].decode(errors="replace") if is_whole else None


def _another_layout(path: Path, layout: int, version: str | None) -> ConfigError:
    age = "a newer" if layout > LAYOUT else "an older"
    writer = f"headrace {version}" if version else f"{age} headrace"
    return ConfigError(
        f"{path} has layout {layout} of {writer}, and headrace {__version__} reads layout {LAYOUT}: nothing was "
        f"changed. Go on with {writer}, restore a backup that {__version__} made, or choose another run_name"
    )


def connect(path: Path, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """Opens the database so that every transaction is on the disk when its COMMIT returns."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0, factory=factory)
    connection.text_factory = decode_text
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA cache_size = -{_PAGE_CACHE_KIB}")
    return connection


def decode_text(data: bytes) -> str:
    """Decodes a key. Damage may have made it unreadable, so it must not raise."""
    return data.decode(errors="replace")


def write_rows(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Replaces rows of the same keys."""
    first, count = 0, _ROWS_PER_STATEMENT
    while first < len(rows):
        while count > len(rows) - first:
            count //= 2  # so that there are few statements, which SQLite has prepared already
        chunk = rows[first : first + count]
        connection.execute(_replacing(table, len(chunk[0]), count), list(chain.from_iterable(chunk)))
        first += count


@cache
def _replacing(table: str, num_columns: int, num_rows: int) -> str:
    row = "(" + ", ".join("?" * num_columns) + ")"
    return f"REPLACE INTO {table} VALUES {', '.join([row] * num_rows)}"  # noqa: S608  # names of our own schema, and marks


def delete_rows(connection: sqlite3.Connection, table: str, key: str, keys: Sequence[str]) -> None:
    """Deletes those of the rows that exist."""
    for first in range(0, len(keys), _ROWS_PER_STATEMENT):
        chunk = keys[first : first + _ROWS_PER_STATEMENT]
        connection.execute(f"DELETE FROM {table} WHERE {key} IN ({', '.join('?' * len(chunk))})", chunk)  # noqa: S608  # names of our own schema, and marks


def checksum(key: str, body: bytes) -> int:
    """Computes a row's checksum over its key and body."""
    return int(crc32c(body, crc32c(key.encode())))


def whole_rows(rows: Iterable[tuple[Any, bytes, int]], table: str, damaged: list[str]) -> Iterable[tuple[Any, bytes]]:
    """Yields keys and bodies; the names of rows with a wrong checksum go to `damaged`."""
    for key, body, crc in rows:
        if isinstance(body, bytes) and checksum(str(key), body) == crc:
            yield key, body
        else:
            damaged.append(f"{table}/{key}")
