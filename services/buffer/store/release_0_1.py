"""Converts a ledger of headrace 0.1.0 (layout 3), once and in one direction, when it is opened.

Payloads stay where they are: 0.1.0 wrote them to `payloads/ID.payloads` of 64 MiB, one record behind the other, and a
row for each extent of consecutive records. Each payload now has a row that names its place. A file goes with its last
payload.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

from services.buffer.ledger.group import SampleRecord
from services.buffer.store import rows, salvage
from services.buffer.store.payload_files import PayloadPlace
from services.buffer.store.sql import checksum

LAYOUT = 3
_KEYS = {"streams": "name", "prompts": "group_id", "groups": "group_id", "events": "position"}
"""Tables whose rows stay as they are, but for the checksum."""
_RECORD_HEADER_BYTES = 16
_NEVER = -1
"""The checksum of a row that was damaged: a start names it."""

Row = tuple[Any, bytes, int]
_load_samples = msgspec.msgpack.Decoder(list[SampleRecord]).decode


class _StoredPayload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    key: str
    payload_bytes: int
    crc: int


_load_extent = msgspec.msgpack.Decoder(tuple[_StoredPayload, ...]).decode


def convert(path: Path, create: Callable[[sqlite3.Connection], None]) -> None:
    """Puts a converted file in the place of `path`, durably. Its log is copied into it first."""
    draft = path.with_name(f"salvage-{path.name}")
    with closing(sqlite3.connect(path, isolation_level=None)) as old, closing(salvage.open_draft(draft)) as new:
        old.text_factory = salvage.decode_text
        old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        create(new)
        with salvage.transaction(new):
            for table, key in _KEYS.items():
                _write(new, table, _same(old, table, key))
            _write(new, "samples", _samples(old))
            _write(new, "payload_files", _places(old))
        row = old.execute("SELECT body, crc FROM meta WHERE key = 'ledger_id'").fetchone()
        if row is not None and crc32c(row[0], crc32c(b"ledger_id")) == row[1]:
            salvage.write_meta(new, "ledger_id", row[0].decode())
        if damaged := _damaged_tables(old):
            aside = salvage.aside_of(path)
            salvage.note(new, damaged, aside)
            aside.hardlink_to(path)
    salvage.replace_durably(draft, path)


def _damaged_tables(old: sqlite3.Connection) -> list[str]:
    """0.1.0 left damaged tables in the file, under names like damaged_9_groups; they are neither read nor copied."""
    statement = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE 'damaged~__%~_%' ESCAPE '~'"
    names = [name.removeprefix("damaged_").partition("_")[2] for (name,) in old.execute(statement)]
    return ["payload_files" if name == "payloads" else name for name in names]


def _write(new: sqlite3.Connection, table: str, found: Iterator[Row]) -> None:
    new.executemany(f"REPLACE INTO {table} VALUES (?, ?, ?)", found)  # noqa: S608  # names of our own schema


def _same(old: sqlite3.Connection, table: str, key_name: str) -> Iterator[Row]:
    for key, body, crc in old.execute(f"SELECT {key_name}, body, crc FROM {table}"):  # noqa: S608  # names of our own schema
        is_whole = isinstance(body, bytes) and crc32c(body, crc32c(str(key).encode())) == crc
        yield key, body, checksum(key, body) if is_whole else _NEVER


def _samples(old: sqlite3.Connection) -> Iterator[Row]:
    """0.1.0 packed the samples of one put into one row, under the key of the first."""
    for key, body, crc in _same(old, "samples", "key"):
        if crc == _NEVER:
            yield key, body, crc
            continue
        for record in _load_samples(body):
            packed = rows.encode(record)
            yield record.key, packed, checksum(record.key, packed)


def _places(old: sqlite3.Connection) -> Iterator[Row]:
    for file_id, offset, body, crc in old.execute("SELECT file_id, offset, body, crc FROM payloads"):
        if crc32c(body, crc32c(offset.to_bytes(8, "little"), crc32c(file_id))) != crc:
            yield f"{file_id.hex()}/{offset}", body, _NEVER
            continue
        for payload in _load_extent(body):
            start = offset + _RECORD_HEADER_BYTES + len(payload.key.encode())
            place = rows.encode(PayloadPlace(f"{file_id.hex()}.payloads", start, payload.payload_bytes))
            yield payload.key, place, checksum(payload.key, place)
            offset = start + payload.payload_bytes
