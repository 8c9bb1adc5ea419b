"""Replaces a damaged `ledger.sqlite` by a new file with every row that can be read.

Only a ledger that was closed is salvaged. Where a log is replayed, another ledger's log may be why pages contradict
each other, and the start is refused. The damaged file is opened read-only and kept as `damaged-N.sqlite`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.disk import sync
from headrace.errors import DataLoss
from headrace.rpc.log import log
from services.buffer.store.base import Damage
from services.buffer.store.sql import TABLES, checksum

_NEEDED = ("sqlite_schema", "meta", "streams")
_SMALL = ("prompts", "samples", "groups", "payload_files")
"""A start reads them whole. Payloads are read when they are asked for, and the history shows its own gaps."""
_FEW_PAGES = 32 << 10
"""128 MiB, which are checked in a fraction of a second."""
_SUSPECT = "suspect"
"""The file that says: damaged pages were met, check all of it."""
_MOST_SKIPPED = 5_000
"""Rows of one table that are tried one by one behind damage. A damaged page has some hundred at most."""
_ROWS_AT_ONCE = 100
_DRAFT = "salvage-"
_NOTE = "damaged/"
"""What the keys in `meta` begin with that say which table was damaged, and in which file its pages are."""


def salvage_damaged(path: Path, source: sqlite3.Connection, create: Callable[[sqlite3.Connection], None]) -> None:
    """Puts a file with the readable rows of a damaged one in its place, durably. A kill leaves one of the two there.

    Raises DataLoss when the ledger cannot start without the damaged table.
    """
    suspected = path.with_name(_SUSPECT)
    problems = {table: problem for table in _checked(source, suspected) if (problem := _problem(source, table))}
    if "1" in problems:
        problems = {t: found for t in ("meta", *TABLES) if (found := _problem(source, t))} or {"": problems["1"]}
    for table in _NEEDED:
        if table in problems:
            raise DataLoss(f"the table {table} of {path} is damaged ({problems[table]})")
    if problems:
        aside = _replace(path, source, create, [table for table in problems if table])
        for table, problem in problems.items():
            log.error("table_damaged", table=table, problem=problem, aside=str(aside))
    suspected.unlink(missing_ok=True)


def _replace(
    path: Path, source: sqlite3.Connection, create: Callable[[sqlite3.Connection], None], damaged: Sequence[str]
) -> Path:
    aside = aside_of(path)
    draft = path.with_name(f"{_DRAFT}{path.name}")
    with ExitStack() as on_failure:
        on_failure.callback(delete_drafts, path.parent)
        with closing(open_draft(draft)) as new:
            create(new)
            for table in ("meta", *TABLES):
                _copy(source, new, table)
            note(new, damaged, aside)
        on_failure.pop_all()
    aside.hardlink_to(path)
    replace_durably(draft, path)
    return aside


def _copy(source: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    whole = (row for row in _by_rowid(source, table) if None not in row)
    while some := list(islice(whole, _ROWS_AT_ONCE)):
        with transaction(new):
            new.executemany(f"REPLACE INTO {table} VALUES ({', '.join('?' * len(some[0]))})", some)  # noqa: S608  # names of our own schema, and marks


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


def aside_of(path: Path) -> Path:
    """Returns the name under which the damaged file is kept."""
    number = 1
    while (aside := path.with_name(f"damaged-{number}.sqlite")).exists():
        number += 1
    return aside


def note(new: sqlite3.Connection, damaged: Sequence[str], aside: Path) -> None:
    """Writes which tables were damaged, so that every start names them."""
    for i, table in enumerate(damaged, len(_notes(new))):
        write_meta(new, f"{_NOTE}{i:06}", f"{table} {aside.name}")


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Raises DataLoss when the pages contradict each other."""
    for table in _checked(connection, path.with_name(_SUSPECT)):
        if problem := _problem(connection, table):
            raise DataLoss(
                f"pages of {path} contradict each other ({problem}): it is damaged, or the log beside it "
                f"({path.name}-wal) is another ledger's"
            )


def suspect(path: Path) -> None:
    """Has the next start check all pages of the file."""
    path.with_name(_SUSPECT).touch()


def salvaged(connection: sqlite3.Connection) -> list[Damage]:
    """Returns the tables that were damaged at this start or an earlier one."""
    return [
        Damage(f"pages of the table {table} were damaged; the file as it was is {aside}")
        for table, aside in _notes(connection).values()
    ]


def _notes(connection: sqlite3.Connection) -> Mapping[str, tuple[str, str]]:
    """Returns (table, name of the file that was damaged) by key."""
    rows = connection.execute("SELECT key, body FROM meta WHERE key LIKE ? ORDER BY key", (f"{_NOTE}%",)).fetchall()
    parts = {key: bytes(body).decode(errors="replace").partition(" ") for key, body in rows}
    return {key: (table, aside) for key, (table, _, aside) in parts.items()}


def _checked(connection: sqlite3.Connection, suspected: Path) -> tuple[str, ...]:
    """What to ask quick_check for; "1" is the whole file, up to the first problem."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    return ("1",) if num_pages <= _FEW_PAGES or suspected.exists() else (*_NEEDED, *_SMALL)


def _problem(connection: sqlite3.Connection, table: str) -> str | None:
    try:
        (found,) = connection.execute(f"PRAGMA quick_check({table})").fetchone()
    except sqlite3.OperationalError:  # of the disk, not of what is on it
        raise
    except sqlite3.DatabaseError as error:
        found = str(error)
    return None if found == "ok" else found


# What all that write `ledger.sqlite` share


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commits at the end, or undoes everything."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:  # it has failed; a full disk ends it by itself
            connection.execute("ROLLBACK")


def write_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    body = value.encode()
    connection.execute("REPLACE INTO meta VALUES (?, ?, ?)", (key, body, checksum(key, body)))


def read_only(path: Path) -> sqlite3.Connection:
    """Opens a database that nobody writes to and that has no log."""
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    connection.text_factory = decode_text
    return connection


def decode_text(data: bytes) -> str:
    """Decodes a key. Damage may have made it unreadable, so it must not raise."""
    return data.decode(errors="replace")


def open_draft(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = DELETE")  # its only file has everything
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def delete_drafts(folder: Path) -> None:
    """Deletes what a start that did not end has left."""
    for path in folder.glob(f"{_DRAFT}*"):
        path.unlink()


def replace_durably(draft: Path, path: Path) -> None:
    """A kill or a power cut leaves one of the two files under the name."""
    sync(path.parent)
    draft.replace(path)
    sync(path.parent)
