"""The state that the segments add up to, in SQLite: what it lacks is in the segments after its mark.

Written behind the segments, many batches at a time; it may lag or vanish, and is then made again from the segments.
Every row carries a CRC-32C over key and body. Many rows go into one statement, so that SQLite runs without the GIL.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crc32c import crc32c

from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.store import segment_rows as codec
from services.buffer.store.places import Place
from services.buffer.store.segment_log import Location
from services.buffer.store.segment_rows import Rows
from services.buffer.stream import StreamState

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams (name TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prompts (group_id TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, position INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    payload_bytes INTEGER, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    first INTEGER PRIMARY KEY, last INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS quarantined (name TEXT PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID;
"""
_INSERTS = {
    "meta": "REPLACE INTO meta VALUES {}",
    "streams": "REPLACE INTO streams VALUES {}",
    "prompts": "INSERT OR IGNORE INTO prompts VALUES {}",
    "groups": "INSERT INTO groups VALUES {} ON CONFLICT (group_id) DO UPDATE SET position = excluded.position, "
    "body = excluded.body, crc = excluded.crc WHERE excluded.position >= groups.position",
    "samples": "INSERT INTO samples VALUES {} ON CONFLICT (key) DO UPDATE SET position = excluded.position, "
    "segment = excluded.segment, offset = excluded.offset, payload_bytes = excluded.payload_bytes, "
    "body = excluded.body, crc = excluded.crc WHERE excluded.position >= samples.position",
    "events": "REPLACE INTO events VALUES {}",
    "quarantined": "REPLACE INTO quarantined VALUES {}",
}
_ROWS_PER_STATEMENT = 250
_KEYS_PER_QUERY = 1_000


class Damaged(Exception):
    """The index is not what was written: make it again."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything before it is in the index."""

    location: Location
    number: int
    position: int
    """Of the latest event."""
    ledger_id: str


class Applied(NamedTuple):
    """A transaction and where its records lie."""

    rows: Rows
    location: Location
    num_bytes: int
    payloads: Sequence[Location]


@dataclass(frozen=True, slots=True)
class State:
    """All of it, in memory."""

    streams: tuple[StreamState, ...]
    groups: tuple[Group, ...]
    places: dict[str, Place]
    """Of every payload that a group holds."""
    position: int
    quarantined: tuple[str, ...]


class SegmentIndex:
    """`apply` and `load` are for one thread, `find_events` for any."""

    def __init__(self, path: Path) -> None:
        self._writer = _connect(path)
        try:
            self._writer.executescript(_SCHEMA)
            problem = self._writer.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise Damaged(str(error)) from error
        if problem != "ok":
            raise Damaged(str(problem))
        self._reader = _connect(path)
        self._reading = threading.Lock()

    def mark(self) -> Mark | None:
        """None when it is empty."""
        row = self._writer.execute("SELECT value, crc FROM meta WHERE key = 'mark'").fetchone()
        if row is None:
            return None
        *numbers, ledger_id = _checked("mark", 0, str(row[0]).encode(), row[1]).decode().split()
        segment, offset, number, position = map(int, numbers)
        return Mark(Location(segment, offset), number, position, ledger_id)

    def apply(self, batch: Sequence[Applied], mark: Mark | None = None, lost: Sequence[tuple[str, int]] = ()) -> None:
        """In order, all or nothing. `lost`: names and positions of rows whose record is damaged.

        Without a mark the same may be applied again, and must be before anything later.
        """
        self._writer.execute("BEGIN IMMEDIATE")
        self._insert("streams", {row[0]: row for row in _stream_rows(batch)}.values())
        self._insert("prompts", _prompt_rows(batch))
        self._insert("groups", _highest(_group_rows(batch)))
        forgotten = [(group_id,) for applied in batch for group_id in applied.rows.forgotten]
        self._writer.executemany("DELETE FROM groups WHERE group_id = ?", forgotten)
        self._writer.executemany("DELETE FROM prompts WHERE group_id = ?", forgotten)
        samples, deleted = _sample_rows(batch)
        self._writer.executemany("DELETE FROM samples WHERE key = ?", [(key,) for key in deleted])
        self._insert("samples", samples)
        self._insert("events", _event_rows(batch))
        self._insert("quarantined", lost)
        if mark:
            value = f"{mark.location.segment} {mark.location.offset} {mark.number} {mark.position} {mark.ledger_id}"
            self._insert("meta", [("mark", value, _crc("mark", 0, value.encode()))])
        self._writer.execute("COMMIT")

    def load(self) -> State:
        """Raises Damaged."""
        try:
            return self._load()
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            raise Damaged(str(error)) from error

    def _load(self) -> State:
        read = self._writer.execute
        streams = [
            codec.load_stream(_checked(name, 0, body, crc))
            for name, body, crc in read("SELECT name, body, crc FROM streams")
        ]
        lost = dict(read("SELECT name, position FROM quarantined"))
        prompts: dict[str, Prompt] = {
            group_id: codec.load_prompt(_checked(group_id, 0, body, crc))
            for group_id, body, crc in read("SELECT group_id, body, crc FROM prompts")
        }
        records: dict[str, SampleRecord] = {}
        places: dict[str, Place] = {}
        for key, position, segment, offset, num_bytes, body, crc in read("SELECT * FROM samples"):
            records[key] = codec.load_sample(_checked(f"{key} {segment} {offset} {num_bytes}", position, body, crc))
            if num_bytes is not None:
                places[key] = Place(segment, offset, num_bytes)
        groups = []
        quarantined = {name for name in lost if name.startswith("groups/")}
        for group_id, position, body, crc in read("SELECT group_id, position, body, crc FROM groups"):
            row, name = _checked(group_id, position, body, crc), f"groups/{group_id}"
            if lost.get(name, 0) > position:
                continue
            try:
                groups.append(codec.load_group(row, prompts[group_id], records))
                quarantined.discard(name)
            except KeyError as error:
                if not lost.keys() & {name, f"prompts/{error.args[0]}", f"samples/{error.args[0]}"}:
                    raise
                quarantined.add(name)  # its prompt or a sample was in a record that is damaged
        held = {r.key for group in groups for r in group.records}
        kept = {key: place for key, place in places.items() if key in held}
        quarantined |= {f"payloads/{key}" for key in kept if f"payloads/{key}" in lost}
        mark = self.mark()
        position = mark.position if mark else 0
        return State(tuple(streams), tuple(groups), kept, position, tuple(sorted(quarantined)))

    def find_events(self, from_position: int, count: int) -> list[tuple[Location, int]]:
        """Transactions (where, length of the record's body) with events at or after a position, in order."""
        with self._reading:
            rows = self._reader.execute(
                "SELECT * FROM events WHERE last >= ? ORDER BY last LIMIT ?", (from_position, count)
            ).fetchall()
        for *values, crc in rows:
            _checked("events", 0, str(values).encode(), crc)
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

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        listed = list(rows)
        for first in range(0, len(listed), _ROWS_PER_STATEMENT):
            chunk = listed[first : first + _ROWS_PER_STATEMENT]
            row = "(" + ", ".join("?" * len(chunk[0])) + ")"
            statement = _INSERTS[table].format(", ".join([row] * len(chunk)))
            self._writer.execute(statement, list(chain.from_iterable(chunk)))


def _stream_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    for applied in batch:
        for row in applied.rows.streams:
            yield row.name, bytes(row.body), _crc(row.name, 0, row.body)


def _prompt_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    for applied in batch:
        for row in applied.rows.prompts:
            yield row.group_id, bytes(row.body), _crc(row.group_id, 0, row.body)


def _group_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    for applied in batch:
        for row in applied.rows.groups:
            yield row.group_id, row.position, bytes(row.body), _crc(row.group_id, row.position, row.body)


def _sample_rows(batch: Sequence[Applied]) -> tuple[Iterable[tuple[Any, ...]], list[str]]:
    """(rows, keys that are gone)."""
    rows: dict[str, tuple[Any, ...]] = {}
    deleted: dict[str, None] = {}
    for applied in batch:
        for key in applied.rows.deleted:
            rows.pop(key, None)
            deleted[key] = None
        locations = iter(applied.payloads)
        for row in applied.rows.samples:
            segment, offset = (0, 0) if row.payload_bytes is None else next(locations)
            crc = _crc(f"{row.key} {segment} {offset} {row.payload_bytes}", row.position, row.body)
            known = rows.get(row.key)
            if known is None or known[1] <= row.position:
                rows[row.key] = row.key, row.position, segment, offset, row.payload_bytes, bytes(row.body), crc
    return rows.values(), list(deleted)


def _event_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    for applied in batch:
        events = applied.rows.events
        if events:
            values = [events[0].position, events[-1].position, *applied.location, applied.num_bytes]
            yield *values, _crc("events", 0, str(values).encode())


def _highest(rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    """Of rows with one key the one with the highest position."""
    found: dict[str, tuple[Any, ...]] = {}
    for row in rows:
        if row[0] not in found or found[row[0]][1] <= row[1]:
            found[row[0]] = row
    return found.values()


def _crc(key: str, position: int, body: Any) -> int:
    return crc32c(body, crc32c(f"{key} {position}".encode()))


def _checked(key: str, position: int, body: bytes, crc: int) -> bytes:
    if _crc(key, position, body) != crc:
        raise Damaged(f"the row of {key} is not as it was written")
    return body


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.DatabaseError as error:
        raise Damaged(str(error)) from error
    return connection
