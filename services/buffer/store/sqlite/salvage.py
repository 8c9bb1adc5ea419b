"""Replaces a damaged `ledger.sqlite` by a new file with every row that can be read.

Only a ledger that was closed is salvaged. Where a log is replayed, another ledger's log may be why pages contradict
each other, and the start is refused. The damaged file is opened read-only and kept as `damaged-N.sqlite`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.errors import DataLoss
from headrace.rpc.log import log
from services.buffer.store.base import Damage
from services.buffer.store.files import sync_folder
from services.buffer.store.sqlite.database import (
    FILE,
    TABLES,
    checksum,
    connect,
    decode_text,
    open_database,
    write_rows,
)
from services.buffer.store.sqlite.writing import transaction

_NEEDED = ("sqlite_schema", "meta", "streams")
_READ_WHOLE = ("prompts", "samples", "groups", "payloads")
"""The other tables that a start reads whole. The history is checked while it is short: it shows its own gaps."""
_BY_ROWID = ("prompts", "samples", "events")
_FEW_PAGES = 32 << 10
"""128 MiB, which are checked in a fraction of a second."""
_MOST_SKIPPED = 5_000
"""Rows of one table that are tried one by one behind damage. A damaged page has some hundred at most."""
_ROWS_AT_ONCE = 1_000
_DRAFT = "salvage-"
_NOTE = "damaged/"
"""What the keys in `meta` begin with that say which table was damaged, and in which file its pages are."""
_OLD_TABLES = r"damaged\__%\_%"
"""Releases before 0.2 left damaged tables in `ledger.sqlite`, under names like damaged_9_groups."""


def check_pages(connection: sqlite3.Connection, folder: Path) -> None:
    """Raises DataLoss when the pages contradict each other. Tables that an earlier release set aside are not read."""
    for table in _checked(connection):
        if problem := _problem(connection, table):
            raise DataLoss(
                f"pages of {folder / FILE} contradict each other ({problem}): it is damaged, or the log beside it "
                f"({FILE}-wal) is another ledger's"
            )


def damaged_tables(connection: sqlite3.Connection, folder: Path) -> dict[str, str]:
    """Table → what is wrong with its pages. Raises DataLoss when the ledger cannot start without a damaged table."""
    checked = _checked(connection)
    if checked == ("1",):
        if (whole := _problem(connection, "1")) is None:
            return {}
        checked = (*_NEEDED, *_READ_WHOLE, "events")
        outside = {"": whole}
    else:
        outside = {}
    problems = {table: problem for table in checked if (problem := _problem(connection, table))}
    for table in _NEEDED:
        if table in problems:
            raise DataLoss(f"the table {table} of {folder / FILE} is damaged ({problems[table]})")
    return problems or outside


def salvage(folder: Path, connection: sqlite3.Connection, problems: Mapping[str, str]) -> None:
    """Closes the connection and puts a file with the readable rows in the place of `ledger.sqlite`, durably.

    A kill at any moment leaves either file under that name.
    """
    earlier = [name.removeprefix("damaged_").partition("_")[2] for name in old_damaged_tables(connection)]
    _empty_log(connection, folder)
    connection.close()
    aside = _aside(folder)
    draft = folder / f"{_DRAFT}{FILE}"
    try:
        with (
            closing(_read_only(folder / FILE)) as source,
            closing(open_database(draft, connect, may_be_new=True)) as new,
        ):
            counts = _copy(source, new, folder / "payloads")
            _note(new, [*earlier, *filter(None, problems)], aside)
    except BaseException:
        delete_drafts(folder)
        raise
    aside.hardlink_to(folder / FILE)
    sync_folder(folder)
    draft.replace(folder / FILE)
    sync_folder(folder)
    for table, problem in problems.items():
        log.error("table_damaged", table=table, problem=problem, num_rows_read=counts.get(table), aside=str(aside))


def delete_drafts(folder: Path) -> None:
    """Deletes what a salvage that did not end has left."""
    for path in folder.glob(f"{_DRAFT}*"):
        path.unlink()


def old_damaged_tables(connection: sqlite3.Connection) -> list[str]:
    """Names of the damaged tables that an earlier release left in the file."""
    statement = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE ? ESCAPE '\\' ORDER BY rowid"
    return [name for (name,) in connection.execute(statement, (_OLD_TABLES,))]


def salvaged(connection: sqlite3.Connection) -> list[Damage]:
    """Returns the tables that were damaged at this start or an earlier one."""
    return [
        Damage(f"pages of the table {table} were damaged; the file as it was is {aside}")
        for table, aside in _notes(connection)
    ]


def has_lost_places(connection: sqlite3.Connection) -> bool:
    """True when rows with the locations of payloads may have been lost, at this start or an earlier one."""
    return any(table == "payloads" for table, _ in _notes(connection))


def _checked(connection: sqlite3.Connection) -> tuple[str, ...]:
    """What to ask quick_check for; "1" is the whole file, up to the first problem."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    if num_pages > _FEW_PAGES:
        return (*_NEEDED, *_READ_WHOLE)
    return (*_NEEDED, *_READ_WHOLE, "events") if old_damaged_tables(connection) else ("1",)


def _problem(connection: sqlite3.Connection, table: str) -> str | None:
    try:
        (found,) = connection.execute(f"PRAGMA quick_check({table})").fetchone()
    except sqlite3.OperationalError:  # of the disk, not of what is on it
        raise
    except sqlite3.DatabaseError as error:
        found = str(error)
    return None if found == "ok" else found


def _empty_log(connection: sqlite3.Connection, folder: Path) -> None:
    """Without this SQLite would replay the damaged file's log into the new one."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    log_file = folder / f"{FILE}-wal"
    if log_file.exists() and log_file.stat().st_size:
        raise DataLoss(f"the log {log_file} cannot be copied into {folder / FILE}, which is damaged")


def _aside(folder: Path) -> Path:
    number = 1
    while (path := folder / f"damaged-{number}.sqlite").exists():
        number += 1
    return path


def _read_only(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    connection.text_factory = decode_text
    return connection


def _copy(source: sqlite3.Connection, new: sqlite3.Connection, payloads: Path) -> dict[str, int]:
    """Returns the number of rows by table."""
    for table in TABLES:
        _write(new, table, _rows(source, table))
    _write(new, "groups", _groups_of_prompts(source, new))
    file_ids = [bytes.fromhex(path.stem) for path in payloads.glob("*.payloads")]
    for file_id in file_ids:
        _write(new, "payloads", _both_ways(source, "payloads", "offset", "WHERE file_id = ?", (file_id,)))
    return {table: new.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in TABLES}  # noqa: S608  # names of our own schema


def _write(new: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    whole = (row for row in rows if None not in row)
    while some := list(islice(whole, _ROWS_AT_ONCE)):
        with transaction(new):
            write_rows(new, table, some)


def _rows(source: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yields the table's readable rows; some come twice."""
    if table in ("meta", "streams"):
        yield from source.execute(f"SELECT * FROM {table}")  # noqa: S608  # names of our own schema
    elif table in _BY_ROWID:
        yield from _by_rowid(source, table)
    else:
        yield from _both_ways(source, table, "group_id" if table == "groups" else "file_id {0}, offset")


def _by_rowid(source: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yields rows upwards and steps over those that cannot be read; where there are too many, down from the last."""
    statement = f"SELECT rowid, * FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"  # noqa: S608  # names of our own schema
    last = num_skipped = 0
    while num_skipped < _MOST_SKIPPED:
        try:
            for rowid, *row in source.execute(statement, (last,)):
                last = rowid
                yield tuple(row)
            return
        except sqlite3.DatabaseError:
            last, num_skipped = last + 1, num_skipped + 1
    with suppress(sqlite3.DatabaseError):
        for _, *row in source.execute(f"{statement} DESC", (last,)):
            yield tuple(row)


def _both_ways(
    source: sqlite3.Connection, table: str, order: str, where: str = "", values: tuple[object, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Yields rows from the front up to the damage, then from the back down to it."""
    for way in ("ASC", "DESC"):
        with suppress(sqlite3.DatabaseError):
            statement = f"SELECT * FROM {table} NOT INDEXED {where} ORDER BY {order.format(way)} {way}"  # noqa: S608  # names of our own schema
            yield from source.execute(statement, values)


def _groups_of_prompts(source: sqlite3.Connection, new: sqlite3.Connection) -> Iterator[tuple[Any, ...]]:
    """Yields groups between two damaged pages, by the ids in the prompts that were read."""
    missing = "SELECT group_id FROM prompts WHERE group_id NOT IN (SELECT group_id FROM groups)"
    for (group_id,) in new.execute(missing).fetchall():
        with suppress(sqlite3.DatabaseError):
            yield from source.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,))


def _note(new: sqlite3.Connection, tables: Iterable[str], aside: Path) -> None:
    number = len(_notes(new))
    for i, table in enumerate(tables):
        key, body = f"{_NOTE}{number + i:06}", f"{table} {aside.name}".encode()
        write_rows(new, "meta", [(key, body, checksum(key, body))])


def _notes(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Returns (table, name of the file that was damaged)."""
    rows = connection.execute("SELECT body FROM meta WHERE key LIKE ? ORDER BY key", (f"{_NOTE}%",)).fetchall()
    parts = [bytes(body).decode(errors="replace").partition(" ") for (body,) in rows]
    return [(table, aside) for table, _, aside in parts]
