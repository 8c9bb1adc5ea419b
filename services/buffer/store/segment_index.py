"""The state that the segments add up to, in SQLite: what it lacks is in the segments after its mark.

Written behind the segments, many batches at a time; it may lag or vanish, and is then made again from the segments.
Many rows go into one statement, so that SQLite runs without the GIL. What a row holds is in `index_rows`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from services.buffer.store import index_rows as rows_of
from services.buffer.store.index_rows import INSERTS, LAYOUT, SCHEMA, Applied, Damaged, checked, crc_of
from services.buffer.store.index_state import State, load_state
from services.buffer.store.segment_log import Location

_ROWS_PER_STATEMENT = 250
_KEYS_PER_QUERY = 1_000


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything before it is in the index."""

    location: Location
    number: int
    position: int
    """Of the latest event."""
    ledger_id: str


class SegmentIndex:
    """`apply` and `load` are for one thread, `find_events` for any. Raises Damaged."""

    def __init__(self, path: Path) -> None:
        self._writer = _connect(path)
        try:
            _require_layout(self._writer)
            self._writer.executescript(SCHEMA)
            problem = self._writer.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise Damaged(str(error)) from error
        if problem != "ok":
            raise Damaged(str(problem))
        self._reader = _connect(path)
        self._reading = threading.Lock()

    def mark(self) -> Mark | None:
        """None when it is empty."""
        value = _meta(self._writer, "mark")
        if value is None:
            return None
        *numbers, ledger_id = value.split()
        segment, offset, number, position = map(int, numbers)
        return Mark(Location(segment, offset), number, position, ledger_id)

    def apply(self, batch: Sequence[Applied], mark: Mark | None = None, lost: Sequence[tuple[str, int]] = ()) -> None:
        """In order, all or nothing. `lost`: names and positions of rows whose record is damaged.

        Without a mark the same may be applied again, and must be before anything later.
        """
        self._writer.execute("BEGIN IMMEDIATE")
        self._insert("streams", rows_of.stream_rows(batch))
        self._insert("prompts", rows_of.prompt_rows(batch))
        self._insert("groups", rows_of.group_rows(batch))
        forgotten = [(group_id,) for applied in batch for group_id in applied.rows.forgotten]
        self._writer.executemany("DELETE FROM groups WHERE group_id = ?", forgotten)
        self._writer.executemany("DELETE FROM prompts WHERE group_id = ?", forgotten)
        samples, deleted = rows_of.sample_rows(batch)
        self._writer.executemany("DELETE FROM samples WHERE key = ?", [(key,) for key in deleted])
        self._insert("samples", samples)
        self._insert("events", rows_of.event_rows(batch))
        self._delete_events(max((applied.rows.events_from or 0 for applied in batch), default=0))
        self._insert("quarantined", lost)
        if mark:
            value = f"{mark.location.segment} {mark.location.offset} {mark.number} {mark.position} {mark.ledger_id}"
            self._set_meta("mark", value)
        self._writer.execute("COMMIT")

    def load(self) -> State:
        """Raises Damaged."""
        mark = self.mark()
        return load_state(self._writer, mark.position if mark else 0, self.oldest_position())

    def oldest_position(self) -> int:
        """Of the history that is kept."""
        with self._reading:
            return _oldest_position(self._reader)

    def segments_with_events(self) -> set[int]:
        """Segments that hold history which is kept."""
        with self._reading:
            return {segment for (segment,) in self._reader.execute("SELECT DISTINCT segment FROM events")}

    def find_events(self, from_position: int, count: int) -> list[tuple[Location, int]]:
        """Transactions (where, length of the record's body) with events at or after a position, in order."""
        with self._reading:
            rows = self._reader.execute(
                "SELECT * FROM events WHERE first >= COALESCE((SELECT MAX(first) FROM events WHERE first <= ?), 0) "
                "ORDER BY first LIMIT ?",
                (from_position, count + 1),
            ).fetchall()
        for *values, crc in rows:
            checked("events", 0, str(values).encode(), crc)
        return [(Location(segment, offset), num_bytes) for _, _, segment, offset, num_bytes, _ in rows]

    def positions(self, table: Literal["groups", "samples"], keys: Sequence[str]) -> dict[str, int]:
        """Of the rows there are."""
        key = {"groups": "group_id", "samples": "key"}[table]
        found: dict[str, int] = {}
        with self._reading:
            for first in range(0, len(keys), _KEYS_PER_QUERY):
                some = keys[first : first + _KEYS_PER_QUERY]
                holes = ", ".join("?" * len(some))
                found.update(
                    self._reader.execute(f"SELECT {key}, position FROM {table} WHERE {key} IN ({holes})", some)
                )
        return found

    def sync(self) -> None:
        """What was applied survives power loss, which it need not: without it the segments are read again."""
        with self._reading:
            is_busy, _, _ = self._reader.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if is_busy:
            raise OSError("the index could not be synced: another process reads it")

    def close(self) -> None:
        """No call comes after it."""
        self._reader.close()
        self._writer.close()

    def _delete_events(self, events_from: int) -> None:
        if events_from > _oldest_position(self._writer):
            self._set_meta("events_from", str(events_from))
            self._writer.execute("DELETE FROM events WHERE first < ? AND last < ?", (events_from, events_from))

    def _set_meta(self, key: str, value: str) -> None:
        self._insert("meta", [(key, value, crc_of(key, 0, value.encode()))])

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        listed = list(rows)
        for first in range(0, len(listed), _ROWS_PER_STATEMENT):
            chunk = listed[first : first + _ROWS_PER_STATEMENT]
            row = "(" + ", ".join("?" * len(chunk[0])) + ")"
            statement = INSERTS[table].format(", ".join([row] * len(chunk)))
            self._writer.execute(statement, list(chain.from_iterable(chunk)))


def _oldest_position(connection: sqlite3.Connection) -> int:
    return int(_meta(connection, "events_from") or 1)


def _meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value, crc FROM meta WHERE key = ?", (key,)).fetchone()
    return checked(key, 0, str(row[0]).encode(), row[1]).decode() if row else None


def _require_layout(connection: sqlite3.Connection) -> None:
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if num_tables and layout != LAYOUT:
        raise Damaged(f"its tables have layout {layout}, this headrace writes {LAYOUT}")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.DatabaseError as error:
        raise Damaged(str(error)) from error
    return connection
