"""All that the index holds, in memory: what a ledger goes on from.

One pass over each table, one checksum and one decoding for each row: the start of a server waits for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.store import segment_rows as codec
from services.buffer.store.index_rows import Damaged, checked, load_samples
from services.buffer.store.places import Place
from services.buffer.stream import StreamState


@dataclass(frozen=True, slots=True)
class State:
    """All of it, in memory."""

    streams: tuple[StreamState, ...]
    groups: tuple[Group, ...]
    places: dict[str, Place]
    """Of every payload that a group holds."""
    position: int
    oldest_position: int
    """Of the history that is kept."""
    quarantined: tuple[str, ...]


def load_state(connection: sqlite3.Connection, position: int, oldest_position: int) -> State:
    """As of the event at `position`, the latest that was applied. Raises Damaged."""
    try:
        return _load(connection, position, oldest_position)
    except (sqlite3.DatabaseError, KeyError, ValueError) as error:
        raise Damaged(str(error)) from error


def _load(connection: sqlite3.Connection, position: int, oldest_position: int) -> State:
    read = connection.execute
    streams = [
        codec.load_stream(checked(name, 0, body, crc))
        for name, body, crc in read("SELECT name, body, crc FROM streams")
    ]
    lost: dict[str, int] = dict(read("SELECT name, position FROM quarantined"))
    prompts: dict[str, Prompt] = {
        group_id: codec.load_prompt(checked(group_id, 0, body, crc))
        for group_id, body, crc in read("SELECT group_id, body, crc FROM prompts")
    }
    records, places = _load_samples(connection)
    groups, quarantined = _load_groups(connection, prompts, records, lost)
    held = {r.key: places[r.key] for group in groups for r in group.records if r.key in places}
    quarantined |= {name for name in lost if name.startswith("payloads/") and name.removeprefix("payloads/") in held}
    return State(tuple(streams), tuple(groups), held, position, oldest_position, tuple(sorted(quarantined)))


def _load_samples(connection: sqlite3.Connection) -> tuple[dict[str, SampleRecord], dict[str, Place]]:
    records: dict[str, SampleRecord] = {}
    places: dict[str, Place] = {}
    for key, position, body, crc in connection.execute("SELECT key, position, body, crc FROM samples"):
        for place, record in load_samples(checked(key, position, body, crc)):
            records[record.key] = record
            if place:
                places[record.key] = place
    return records, places


def _load_groups(
    connection: sqlite3.Connection,
    prompts: Mapping[str, Prompt],
    records: Mapping[str, SampleRecord],
    lost: Mapping[str, int],
) -> tuple[list[Group], set[str]]:
    """(groups, names of those that are not whole)."""
    groups: list[Group] = []
    quarantined = {name for name in lost if name.startswith("groups/")}
    for group_id, position, body, crc in connection.execute("SELECT group_id, position, body, crc FROM groups"):
        row, name = checked(group_id, position, body, crc), f"groups/{group_id}"
        if lost.get(name, 0) > position:
            continue
        try:
            groups.append(codec.load_group(row, prompts[group_id], records))
            quarantined.discard(name)
        except KeyError as error:
            if not lost.keys() & {name, f"prompts/{error.args[0]}", f"samples/{error.args[0]}"}:
                raise
            quarantined.add(name)  # its prompt or a sample was in a record that is damaged
    return groups, quarantined
