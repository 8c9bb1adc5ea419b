"""A ledger of headrace 0.1.0, made here row by row, as a start of today converts it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from headrace.errors import DataLoss
from services.buffer.ledger.group import SampleRecord
from services.buffer.store import rows
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.contract.buffer.test_buffer_stores import busy_ledger
from tests.support.ledgers.ledger_under_test import LedgerUnderTest

_FILE = bytes(range(16))


def crc(key: object, body: bytes) -> int:
    return int(crc32c(body, crc32c(str(key).encode())))


def write_0_1(it: LedgerUnderTest, folder: Path, damaged: Sequence[str] = ()) -> None:
    """Its tables and its payload file; rows with a key of `damaged` have a wrong checksum."""
    (folder / "payloads").mkdir(parents=True)
    snapshot = it.store.load()
    events = it.store.read_events(1, 10_000)
    encode = msgspec.msgpack.encode
    tables: dict[str, list[tuple[object, bytes]]] = {
        "meta": [("ledger_id", snapshot.ledger_id.encode())],
        "streams": [(state.name, encode(state)) for state in snapshot.streams],
        "prompts": [(group.group_id, encode(group.prompt)) for group in snapshot.groups],
        "groups": [(group.group_id, rows.dump_group(group)) for group in snapshot.groups],
        "samples": [(some[0].key, encode(some)) for group in snapshot.groups for some in calls(group.samples)],
        "events": [(event.position, encode(event)) for event in events],
    }
    tables["samples"] += [(some[0].key, encode(some)) for g in snapshot.groups for some in calls(g.partials)]
    keys = {"meta": "key", "streams": "name", "prompts": "group_id", "groups": "group_id", "samples": "key"}
    data = bytearray(b"the header of the file")
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database, database:
        for table, bodies in tables.items():
            key_name = keys.get(table, "position")
            database.execute(f"CREATE TABLE {table} ({key_name} PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)")
            values = [(key, body, crc(key, body) + (key in damaged)) for key, body in bodies]
            database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", values)
        database.execute("CREATE TABLE payloads (file_id BLOB, offset INTEGER, body BLOB, crc INTEGER)")
        for group in snapshot.groups:
            if not group.records:
                continue
            offset, extent = len(data), []
            for record, payload in zip(group.records, it.store.read_payloads(group.records), strict=True):
                data += bytes(16) + record.key.encode() + payload
                extent.append((record.key, len(payload), 0))
            body = encode(extent)
            checksum = crc32c(body, crc32c(offset.to_bytes(8, "little"), crc32c(_FILE)))
            database.execute("INSERT INTO payloads VALUES (?, ?, ?, ?)", (_FILE, offset, body, checksum))
        database.execute("PRAGMA user_version = 3")
    (folder / "payloads" / f"{_FILE.hex()}.payloads").write_bytes(data)


def calls(records: Sequence[SampleRecord]) -> list[Sequence[SampleRecord]]:
    return [records] if records else []


def test_a_ledger_of_0_1_0_is_the_same_after_its_conversion_and_its_file_goes_with_its_payloads(tmp_path: Path) -> None:
    it = busy_ledger(MemoryStore())
    before = it.store.load()
    held = [record for group in before.groups for record in group.records]
    payloads = [bytes(payload) for payload in it.store.read_payloads(held)]
    write_0_1(it, tmp_path)
    for _ in range(2):
        store = SqliteStore(tmp_path)
        snapshot = store.load()
        assert (snapshot.ledger_id, snapshot.streams, snapshot.position) == (
            before.ledger_id,
            before.streams,
            before.position,
        )
        assert {group.group_id: group for group in snapshot.groups} == {g.group_id: g for g in before.groups}
        assert [bytes(payload) for payload in store.read_payloads(held)] == payloads
        assert [event.position for event in store.read_events(1, 1_000)] == list(range(1, before.position + 1))
        assert store.damage() == []
        store.close()
    it = LedgerUnderTest(SqliteStore(tmp_path))
    (file,) = (tmp_path / "payloads").iterdir()
    it.do(it.ledger.delete_stream(it.now, "train", force=True))
    while it.ledger.leftovers:
        it.do(it.ledger.purge_deleted(it.now, "train"))
    assert not file.exists()
    it.store.close()


def test_a_damaged_row_of_0_1_0_is_named_and_the_rest_is_converted(tmp_path: Path) -> None:
    it = busy_ledger(MemoryStore())
    write_0_1(it, tmp_path, damaged=["train/5"])
    store = SqliteStore(tmp_path)
    assert len(store.load().groups) == 11
    assert "train/5" in {found.group_id for found in store.damage()}
    store.close()


def test_a_ledger_of_0_1_0_with_a_damaged_page_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    write_0_1(busy_ledger(MemoryStore()), tmp_path)
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'samples'").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(DataLoss, match="restore a backup"):
        SqliteStore(tmp_path)
    assert path.read_bytes()[100:] == data[100:]
