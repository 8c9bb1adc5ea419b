"""Reads the tables back: damaged rows are reported and left where they are, the rest is served."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from services.buffer.ledger.group import Group, Prompt, SampleRecord
from services.buffer.ledger.stream import StreamState
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage
from services.buffer.store.sqlite.database import whole_rows
from services.buffer.store.sqlite.extent import Extent, StoredPayload
from services.buffer.store.sqlite.writing import extent_checksum

_payloads_decoder = msgspec.msgpack.Decoder(tuple[StoredPayload, ...])


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The contents of the tables."""

    streams: tuple[StreamState, ...]
    lost_streams: tuple[str, ...]
    groups: tuple[Group, ...]
    position: int
    oldest_position: int
    lost_groups: tuple[str, ...]
    damage: tuple[Damage, ...]


def load_state(connection: sqlite3.Connection) -> LoadedState:
    """Skips the groups of streams whose own row is damaged."""
    read, damaged = connection.execute, list[str]()
    rows = whole_rows(read("SELECT name, body, crc FROM streams"), "streams", damaged)
    streams = {name: codec.load_stream(body) for name, body in rows}
    rows = whole_rows(read("SELECT group_id, body, crc FROM prompts"), "prompts", damaged)
    prompts = {group_id: codec.load_prompt(body) for group_id, body in rows}
    rows = whole_rows(read("SELECT key, body, crc FROM samples"), "samples", damaged)
    records = {record.key: record for _, body in rows for record in codec.load_samples(body)}
    rows = whole_rows(read("SELECT group_id, body, crc FROM groups"), "groups", damaged)
    lost_samples = dict[str, dict[int, str]]()
    groups = list(_whole_groups(rows, prompts, records, damaged, lost_samples))
    there = {group.group_id for group in groups}
    # A group whose row has lost its key is known by its prompt and its samples.
    known = dict.fromkeys((*prompts, *map(_group_of, records)))
    damaged += [name for group_id in known if group_id not in there and (name := f"groups/{group_id}") not in damaged]
    (oldest,) = read("SELECT COALESCE(MIN(position), 1) FROM events").fetchone()
    (position,) = read("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()  # both at once read the whole table
    lost = {name.removeprefix("streams/") for name in damaged if name.startswith("streams/")}
    lost |= {group.stream for group in groups if group.stream not in streams}
    damages = (*map(_row_damage, damaged), *_lost_samples(connection, lost_samples))
    return LoadedState(
        tuple(streams.values()),
        tuple(sorted(lost)),
        tuple(group for group in groups if group.stream in streams),
        max(position, max((group.position for group in groups), default=0)),
        oldest,
        tuple(sorted({damage.group_id for damage in damages if damage.group_id} - there)),
        damages,
    )


def load_extents(connection: sqlite3.Connection) -> tuple[list[Extent], list[Damage]]:
    """Returns (extents, damaged rows)."""
    damaged: list[Damage] = []
    return list(_whole_extents(connection, damaged)), damaged


def payload_damage(connection: sqlite3.Connection, extent: Extent, key: str, what: str) -> Damage:
    """Describes one payload of an extent by its group's and its sample's name."""
    row = connection.execute("SELECT body FROM samples WHERE key = ?", (extent.payloads[0].key,)).fetchone()
    records = codec.load_samples(row[0]) if row else []
    sample_id = next((record.sample_id for record in records if record.key == key), None)
    return Damage(what, key.rpartition("#")[0], sample_id)


def _whole_extents(connection: sqlite3.Connection, damaged: list[Damage]) -> Iterator[Extent]:
    for file_id, offset, body, crc in connection.execute("SELECT file_id, offset, body, crc FROM payloads"):
        if _is_row(file_id, offset, body) and extent_checksum(file_id, offset, body) == crc:
            payloads = _payloads_decoder.decode(body)
            yield Extent(file_id, offset, payloads, sum([payload.record_bytes for payload in payloads]))
        else:
            damaged.append(Damage(f"a row with the location of payloads, at {offset}, is damaged"))


def _is_row(file_id: object, offset: object, body: object) -> bool:
    """Checks types: SQLite stores a value of any type in any column, and damage may have changed one."""
    is_place = isinstance(file_id, bytes) and isinstance(offset, int) and 0 <= offset < 1 << 63
    return is_place and isinstance(body, bytes)


def _whole_groups(
    rows: Iterable[tuple[str, bytes]],
    prompts: Mapping[str, Prompt],
    records: Mapping[str, SampleRecord],
    damaged: list[str],
    lost: dict[str, dict[int, str]],
) -> Iterator[Group]:
    for group_id, body in rows:
        try:
            yield codec.load_group(body, prompts[group_id], records)
        except KeyError:  # its prompt or a sample is damaged
            damaged.append(f"groups/{group_id}")
            keys = codec.sample_keys(body)
            lost[group_id] = {place: key for place, key in enumerate(keys) if key not in records}


def _lost_samples(connection: sqlite3.Connection, lost: Mapping[str, Mapping[int, str]]) -> Iterator[Damage]:
    """Names samples whose rows are lost: their ids stand in the history, where their group was put."""
    if not any(lost.values()):
        return
    ids = dict[str, tuple[str, ...]]()
    with suppress(sqlite3.DatabaseError, msgspec.MsgspecError):
        for (body,) in connection.execute("SELECT body FROM events WHERE position >= 1 ORDER BY position"):
            event = codec.load_event(body)
            if event.group_id is not None and event.group_id in lost and event.sample_ids:
                ids[event.group_id] = event.sample_ids
    for group_id, keys in lost.items():
        for place, key in keys.items():
            sample_id = next(iter(ids.get(group_id, ())[place : place + 1]), None)
            yield Damage(f"the row of the sample with the key {key} is damaged or lost", group_id, sample_id)


def _group_of(key: str) -> str:
    return key.rpartition("#")[0]


def _row_damage(name: str) -> Damage:
    table, _, key = name.partition("/")
    return Damage(f"the row {name} is damaged", key if table in ("groups", "prompts") else None)
