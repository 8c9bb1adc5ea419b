"""Writes a commit's rows into the tables, in one transaction of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from crc32c import crc32c

from headrace.rpc.log import log
from services.buffer.ledger.group import SampleRecord
from services.buffer.store import rows as codec
from services.buffer.store.sqlite.database import checksum, delete_rows, write_rows
from services.buffer.store.sqlite.extent import Extent

_encode = msgspec.msgpack.Encoder().encode
_PLACES_PER_STATEMENT = 250


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commits at the end, or undoes everything."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk ends it by itself
            connection.execute("ROLLBACK")
        raise


def write_state(connection: sqlite3.Connection, batch: Sequence[codec.TransactionRows]) -> None:
    """Writes streams, prompts, groups, samples and events; rows deleted again in the same batch are not written."""
    _write(connection, "streams", {key: body for rows in batch for key, body in rows.streams})
    _write(connection, "prompts", {key: body for rows in batch for key, body in rows.prompts})
    _write(connection, "groups", {key: body for rows in batch for key, body in rows.groups})
    forgotten = [group_id for rows in batch for group_id in rows.forgotten]
    delete_rows(connection, "groups", "group_id", forgotten)
    delete_rows(connection, "prompts", "group_id", forgotten)
    samples, deleted = _samples(batch)
    delete_rows(connection, "samples", "key", deleted)
    _write(connection, "samples", {key: codec.dump_samples(records) for key, records in samples.items()})
    events = [(position, body, checksum(str(position), body)) for rows in batch for position, body in rows.events]
    write_rows(connection, "events", events)


def delete_events(connection: sqlite3.Connection, batch: Sequence[codec.TransactionRows]) -> None:
    """Deletes the history's oldest events, after the commit. If their pages are damaged they stay, without an error."""
    end = max((rows.events_from or 0 for rows in batch), default=0)
    if not end:
        return
    try:
        with transaction(connection):
            connection.execute("DELETE FROM events WHERE position < ?", (end,))
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname != "SQLITE_CORRUPT":
            raise
        log.error("history_kept", before_position=end, error=str(error))


def write_extents(connection: sqlite3.Connection, extents: Sequence[Extent]) -> None:
    """Writes the rows that name extents; their payloads are on the disk already."""
    write_rows(connection, "payloads", [_extent_row(extent) for extent in extents])


def delete_extents(connection: sqlite3.Connection, extents: Sequence[Extent]) -> int:
    """Returns how many of the extents a row named."""
    found = 0
    for first in range(0, len(extents), _PLACES_PER_STATEMENT):
        chunk = extents[first : first + _PLACES_PER_STATEMENT]
        values = ", ".join(["(?, ?)"] * len(chunk))
        statement = f"DELETE FROM payloads WHERE (file_id, offset) IN (VALUES {values})"  # noqa: S608  # marks only
        found += connection.execute(statement, [part for extent in chunk for part in extent.place]).rowcount
    return found


def has_extents(connection: sqlite3.Connection, file_id: bytes) -> bool:
    """True when a row names the file."""
    return connection.execute("SELECT 1 FROM payloads WHERE file_id = ? LIMIT 1", (file_id,)).fetchone() is not None


def extent_checksum(file_id: bytes, offset: int, body: bytes) -> int:
    """Computes the checksum of a row of `payloads`."""
    return int(crc32c(body, crc32c(offset.to_bytes(8, "little"), crc32c(file_id))))


def _extent_row(extent: Extent) -> tuple[bytes, int, bytes, int]:
    body = _encode(extent.payloads)
    return *extent.place, body, extent_checksum(extent.file_id, extent.offset, body)


def _write(connection: sqlite3.Connection, table: str, rows: Mapping[str, bytes]) -> None:
    write_rows(connection, table, [(key, body, checksum(key, body)) for key, body in rows.items()])


def _samples(batch: Sequence[codec.TransactionRows]) -> tuple[dict[str, list[SampleRecord]], list[str]]:
    """Returns (records by the key of the first one of a command and group, deleted keys)."""
    written: dict[str, list[SampleRecord]] = {}
    deleted: list[str] = []
    for rows in batch:
        for key in rows.deleted:
            written.pop(key, None)
        deleted += rows.deleted
        written.update((records[0].key, records) for records in rows.samples)
    return written, deleted
