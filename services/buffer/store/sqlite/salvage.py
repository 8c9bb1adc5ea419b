"""Salvages damaged pages of `ledger.sqlite`: readable rows move to a new table, and the rest is served.

This is done only for a ledger that was closed: where a log is replayed, another ledger's log may be why pages
contradict each other, and the start is refused. The tables that a start reads whole are checked, and the history while
it is short, as it shows its own gaps. A damaged table is renamed, never written again, and reported at each start.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import DataLoss
from headrace.rpc.log import log
from services.buffer.store.base import Damage
from services.buffer.store.sqlite.database import FILE, TABLES, write_rows
from services.buffer.store.sqlite.writing import transaction

_NEEDED = ("sqlite_schema", "meta", "streams")
_ORDERS = {"prompts": "rowid", "samples": "rowid", "groups": "group_id", "payloads": "file_id {0}, offset"}
_FEW_PAGES = 32 << 10
"""128 MiB, which are checked in a fraction of a second."""
_DAMAGED = re.compile(r"damaged_\d+_(\w+)")


def check_pages(connection: sqlite3.Connection, folder: Path) -> None:
    """Raises DataLoss when the pages contradict each other."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    tables = (*_NEEDED, *_ORDERS) if num_pages > _FEW_PAGES else ("1",)  # 1: all, up to the first problem
    for table in tables:
        if problem := _problem(connection, table):
            raise DataLoss(
                f"pages of {folder / FILE} contradict each other ({problem}): it is damaged, or the log beside it "
                f"({FILE}-wal) is another ledger's"
            )


def salvage_tables(connection: sqlite3.Connection, folder: Path) -> None:
    """Raises DataLoss when the ledger cannot go on without a damaged table."""
    for table in _NEEDED:
        if problem := _problem(connection, table):
            raise DataLoss(f"the table {table} of {folder / FILE} is damaged ({problem})")
    for table in _ORDERS:
        if problem := _problem(connection, table):
            _salvage(connection, table, problem)


def salvaged(connection: sqlite3.Connection) -> list[Damage]:
    """Returns the tables that were damaged at this start or an earlier one."""
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY rowid").fetchall()
    return [_damage(match) for (name,) in names if (match := _DAMAGED.fullmatch(name))]


def has_lost_places(connection: sqlite3.Connection) -> bool:
    """True when rows with the locations of payloads may have been lost, at this start or an earlier one."""
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    return any((match := _DAMAGED.fullmatch(name)) and match[1] == "payloads" for (name,) in names)


def _problem(connection: sqlite3.Connection, table: str) -> str | None:
    try:
        (found,) = connection.execute(f"PRAGMA quick_check({table})").fetchone()
    except sqlite3.OperationalError:  # of the disk, not of what is on it
        raise
    except sqlite3.DatabaseError as error:
        found = str(error)
    return None if found == "ok" else found


def _salvage(connection: sqlite3.Connection, table: str, problem: str) -> None:
    *keys, _, _ = (row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
    rows = {row[: len(keys)]: row for row in _readable(connection, table) if None not in row}
    (number,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema WHERE type = 'table'").fetchone()
    aside = f"damaged_{number}_{table}"
    with transaction(connection):
        connection.execute(f"ALTER TABLE {table} RENAME TO {aside}")
        connection.execute(f"CREATE TABLE {table} {TABLES[table]}")
        write_rows(connection, table, list(rows.values()))
    log.error("table_damaged", table=table, problem=problem, num_rows_read=len(rows), aside=aside)


def _readable(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yields rows from the front up to the damage, then from the back down to it; some come twice."""
    for direction in ("ASC", "DESC"):
        order = _ORDERS[table].format(direction)
        with suppress(sqlite3.DatabaseError):
            yield from connection.execute(f"SELECT * FROM {table} NOT INDEXED ORDER BY {order} {direction}")  # noqa: S608  # names of our own schema


def _damage(match: re.Match[str]) -> Damage:
    return Damage(f"pages of the table {match[1]} were damaged; the rows that could not be read are in {match[0]}")
