"""The rows of the index: what each table holds of a transaction, every row with a CRC-32C over key and body.

What one transition brought of a group's samples is one row, under the key of the first: it comes and goes as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from services.buffer.group import SampleRecord
from services.buffer.store.places import Place
from services.buffer.store.segment_log import Location
from services.buffer.store.segment_rows import Rows, SampleRow

LAYOUT = 2
"""Of the tables. An index of another is made again from the segments."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams (name TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prompts (group_id TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, position INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    first INTEGER PRIMARY KEY, last INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS quarantined (name TEXT PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA user_version = {LAYOUT};
"""
_VERSIONED = (
    "INSERT INTO {table} VALUES {{}} ON CONFLICT ({key}) DO UPDATE SET position = excluded.position, "
    "body = excluded.body, crc = excluded.crc WHERE excluded.position >= {table}.position"
)
INSERTS = {
    "meta": "REPLACE INTO meta VALUES {}",
    "streams": "REPLACE INTO streams VALUES {}",
    "prompts": "INSERT OR IGNORE INTO prompts VALUES {}",
    "groups": _VERSIONED.format(table="groups", key="group_id"),
    "samples": _VERSIONED.format(table="samples", key="key"),
    "events": "REPLACE INTO events VALUES {}",
    "quarantined": "REPLACE INTO quarantined VALUES {}",
}
_encode = msgspec.msgpack.Encoder().encode
_samples_decoder = msgspec.msgpack.Decoder(list[tuple[Place | None, SampleRecord]])


class Damaged(Exception):
    """The index is not what was written: make it again."""


class Applied(NamedTuple):
    """A transaction and where its records lie."""

    rows: Rows
    location: Location
    num_bytes: int
    payloads: Sequence[Location]


def stream_rows(batch: Sequence[Applied]) -> Iterable[tuple[Any, ...]]:
    """The latest of each."""
    rows = (row for applied in batch for row in applied.rows.streams)
    return {row.name: (row.name, bytes(row.body), crc_of(row.name, 0, row.body)) for row in rows}.values()


def prompt_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    """Each comes once."""
    for applied in batch:
        for row in applied.rows.prompts:
            yield row.group_id, bytes(row.body), crc_of(row.group_id, 0, row.body)


def group_rows(batch: Sequence[Applied]) -> Iterable[tuple[Any, ...]]:
    """The version of each with the highest position."""
    found: dict[str, tuple[Any, ...]] = {}
    for row in (row for applied in batch for row in applied.rows.groups):
        if row.group_id not in found or found[row.group_id][1] <= row.position:
            crc = crc_of(row.group_id, row.position, row.body)
            found[row.group_id] = row.group_id, row.position, bytes(row.body), crc
    return found.values()


def sample_rows(batch: Sequence[Applied]) -> tuple[Iterable[tuple[Any, ...]], list[str]]:
    """(rows, keys that are gone)."""
    rows: dict[str, tuple[Any, ...]] = {}
    deleted: dict[str, None] = {}
    for applied in batch:
        for key in applied.rows.deleted:
            rows.pop(key, None)
            deleted[key] = None
        locations = iter(applied.payloads)
        for position, brought in groupby(applied.rows.samples, attrgetter("position")):
            samples = list(brought)
            key = samples[0].key
            body = _encode([(_place(row, locations), row.body) for row in samples])
            if key not in rows or rows[key][1] <= position:
                rows[key] = key, position, body, crc_of(key, position, body)
    return rows.values(), list(deleted)


def load_samples(body: bytes) -> list[tuple[Place | None, SampleRecord]]:
    """What a row of `samples` holds."""
    return _samples_decoder.decode(body)


def event_rows(batch: Sequence[Applied]) -> Iterator[tuple[Any, ...]]:
    """Where each transaction's part of the history lies."""
    for applied in batch:
        events = applied.rows.events
        if events:
            values = [events[0].position, events[-1].position, *applied.location, applied.num_bytes]
            yield *values, crc_of("events", 0, str(values).encode())


def crc_of(key: str, position: int, body: Any) -> int:
    """Goes with the row."""
    return crc32c(body, crc32c(f"{key} {position}".encode()))


def checked(key: str, position: int, body: bytes, crc: int) -> bytes:
    """The body. Raises Damaged."""
    if crc_of(key, position, body) != crc:
        raise Damaged(f"the row of {key} is not as it was written")
    return body


def _place(row: SampleRow, locations: Iterator[Location]) -> Place | None:
    return None if row.payload_bytes is None else Place(*next(locations), row.payload_bytes)
