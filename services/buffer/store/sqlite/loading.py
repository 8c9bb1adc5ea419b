"""The tables read back: what is not as it was written is named and left where it is, the rest goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headrace.errors import DataLoss
from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage
from services.buffer.store.sqlite.database import STATE_TABLES, whole_rows
from services.buffer.store.sqlite.extent import Extent, StoredPayload
from services.buffer.store.sqlite.writing import extent_checksum
from services.buffer.stream import StreamState

_payloads_decoder = msgspec.msgpack.Decoder(tuple[StoredPayload, ...])


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What the tables say."""

    streams: tuple[StreamState, ...]
    groups: tuple[Group, ...]
    position: int
    oldest_position: int
    damaged: tuple[Damage, ...]


def check_tables(connection: sqlite3.Connection) -> None:
    """Raises DataLoss when their pages contradict each other."""
    for table in STATE_TABLES:
        try:
            (problem,) = connection.execute(f"PRAGMA quick_check('{table}')").fetchone()
        except sqlite3.DatabaseError as error:
            problem = str(error)
        if problem != "ok":
            raise DataLoss(f"the table {table} of ledger.sqlite is damaged ({problem}): restore a backup")


def load_state(connection: sqlite3.Connection) -> LoadedState:
    """Raises DataLoss when a stream's row is damaged."""
    read, damaged = connection.execute, list[str]()
    rows = whole_rows(read("SELECT name, body, crc FROM streams"), "streams", damaged)
    streams = tuple(codec.load_stream(body) for _, body in rows)
    if damaged:
        raise DataLoss(f"the records {damaged} are damaged, nothing can go on without: restore the data directory")
    rows = whole_rows(read("SELECT group_id, body, crc FROM prompts"), "prompts", damaged)
    prompts = {group_id: codec.load_prompt(body) for group_id, body in rows}
    rows = whole_rows(read("SELECT key, body, crc FROM samples"), "samples", damaged)
    records = {record.key: record for _, body in rows for record in codec.load_samples(body)}
    rows = whole_rows(read("SELECT group_id, body, crc FROM groups"), "groups", damaged)
    groups: list[Group] = []
    for group_id, body in rows:
        group = _group(group_id, body, prompts, records)
        if group:
            groups.append(group)
        else:
            damaged.append(f"groups/{group_id}")
    oldest, position = read("SELECT COALESCE(MIN(position), 1), COALESCE(MAX(position), 0) FROM events").fetchone()
    return LoadedState(streams, tuple(groups), position, oldest, tuple(map(_row_damage, damaged)))


def load_extents(connection: sqlite3.Connection) -> tuple[list[Extent], list[Damage]]:
    """(extents, rows that are not as they were written)."""
    damaged: list[Damage] = []
    return list(_whole_extents(connection, damaged)), damaged


def _whole_extents(connection: sqlite3.Connection, damaged: list[Damage]) -> Iterator[Extent]:
    for file_id, offset, body, crc in connection.execute("SELECT file_id, offset, body, crc FROM payloads"):
        if extent_checksum(file_id, offset, body) == crc:
            yield Extent(file_id, offset, _payloads_decoder.decode(body))
        else:
            damaged.append(Damage(f"the row of the payloads at {offset} of {file_id.hex()} is damaged"))


def _group(
    group_id: str, body: bytes, prompts: Mapping[str, Prompt], records: Mapping[str, SampleRecord]
) -> Group | None:
    try:
        return codec.load_group(body, prompts[group_id], records)
    except KeyError:  # its prompt or a sample is damaged
        return None


def _row_damage(name: str) -> Damage:
    table, _, key = name.partition("/")
    return Damage(f"the row {name} is damaged", key if table in ("groups", "prompts") else None)
