"""The store in a folder: SQLite for the rows, append-only files for the payloads."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.digest import digest_of
from headrace.errors import ConfigError, DataLoss, NotFound
from services.buffer.ledger.group import SampleRecord
from services.buffer.store.base import Damage, checked_payload
from services.buffer.store.salvage import transaction
from services.buffer.store.sqlite import PositionMark, SqliteStore, connect
from tests.contract.buffer.test_buffer_stores import busy_ledger
from tests.support.faults.durable_points import image
from tests.support.ledgers.buffer_samples import complete_put, completed_sample, text_prompts
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete
from tests.support.processes.buffer_server import served_buffer


def damage(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database, database:
        assert database.execute(statement).rowcount == 1


def test_a_row_under_the_key_of_another_is_damaged(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    other = "(SELECT body, crc FROM prompts WHERE group_id = 'train/4')"
    damage(tmp_path, f"UPDATE prompts SET (body, crc) = {other} WHERE group_id = 'train/5'")
    it.store.load()
    assert Damage("the row prompts/train/5 is damaged", "train/5") in it.store.damage()
    it.store.close()


def test_promise_9_a_damaged_group_is_set_aside_and_named_and_the_others_are_loaded(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    damage(tmp_path, "UPDATE groups SET crc = crc + 1 WHERE group_id = 'train/5'")
    it.store.close()
    it.store = SqliteStore(tmp_path)
    it.store.load()
    assert it.store.damage() == [Damage("the row groups/train/5 is damaged", "train/5")]
    it.restart()
    assert len(it.ledger.stream("train").groups) == 11


def test_promise_9_a_batch_that_lost_a_group_is_data_loss_and_not_a_smaller_batch(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    victim = it.batch(2, 1).groups[0].group_id
    damage(tmp_path, f"UPDATE groups SET crc = crc + 1 WHERE group_id = '{victim}'")
    it.restart()
    with pytest.raises(DataLoss, match="the records of 1 of the 2 groups in the batch of step 1 are damaged"):
        it.batch(2, 1)


@pytest.mark.parametrize("table", ["groups", "samples"])
async def test_a_batch_that_lost_a_group_says_which_command_helps_and_it_does(table: str, tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    lost, kept = it.batch(2, 1).groups
    row = f"key = '{lost.samples[0].key}'" if table == "samples" else f"group_id = '{lost.group_id}'"
    it.store.close()
    damage(tmp_path, f"UPDATE {table} SET crc = crc + 1 WHERE {row}")
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        with pytest.raises(DataLoss) as refused:
            await client.try_lease_batch("train", 2, 1)
        assert refused.value.reason == "GROUP_LOST"
        command = refused.value.message.rpartition(": headrace ")[2].split()
        assert lost.group_id in command
        assert await asyncio.to_thread(main, [*command, "--buffer-address", server.address]) == 0
        batch = await client.try_lease_batch("train", 2, 1)
        assert [group.group_id for group in batch.groups] == [kept.group_id, "train/5"]
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        (found,) = (await client.list_groups("train", group_ids=[lost.group_id])).groups
        assert (found.state, found.failure.reason) == (pb.GROUP_STATE_DROPPED, "OPERATOR")
        assert await client.try_lease_batch("train", 2, 1) == batch
        await client.consume("train", 2, 1, batch.digest)


@pytest.mark.parametrize("harm", ["DELETE FROM events", "UPDATE events SET crc = crc + 1"])
def test_a_line_of_the_history_that_is_missing_or_changed_is_data_loss(tmp_path: Path, harm: str) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    damage(tmp_path, f"{harm} WHERE position = 5")
    assert [event.position for event in it.store.read_events(1, 100)] == [1, 2, 3, 4]
    if harm.startswith("UPDATE"):
        with pytest.raises(DataLoss, match="event 5 of the history is damaged: watch from position 6"):
            it.store.read_events(5, 100)
    assert it.store.read_events(6, 1)[0].position == 6
    it.store.close()


def test_the_mark_of_another_ledger_is_data_loss(tmp_path: Path) -> None:
    mark = PositionMark(tmp_path / "position")
    mark.write("one", 3)
    mark.require("one", 3)
    with pytest.raises(DataLoss, match="another ledger's than the file `position` beside it"):
        mark.require("another", 4)
    with pytest.raises(DataLoss, match="ends at position 2, and the ledger was at 3"):
        mark.require("one", 2)
    mark.close()


def test_a_killed_ledger_with_a_damaged_page_that_its_log_does_not_have_is_data_loss(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path / "run"))
    it.store.close()
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'prompts'").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    it.store = SqliteStore(tmp_path / "run")
    it.restart()
    it.rewind(1)
    killed = image(tmp_path / "run", tmp_path / "killed")
    with (killed / "ledger.sqlite").open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    with pytest.raises(DataLoss, match="is damaged"):
        SqliteStore(killed)
    it.store.close()


def test_two_processes_cannot_have_one_data_dir(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    with pytest.raises(ConfigError, match="in use by another buffer"):
        SqliteStore(tmp_path)
    store.close()
    SqliteStore(tmp_path).close()


def test_payload_files_without_their_database_are_not_taken_for_a_new_ledgers(tmp_path: Path) -> None:
    busy_ledger(SqliteStore(tmp_path, large_call_bytes=1)).store.close()
    for name in ("ledger.sqlite", "position"):
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()}
    assert before
    with pytest.raises(DataLoss, match=r"ledger\.sqlite is gone, .*: move .* away and restore a backup with"):
        SqliteStore(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()} == before


def records_of(it: LedgerUnderTest) -> list[SampleRecord]:
    return [record for group in it.ledger.stream("train").groups.values() for record in group.records]


def test_a_large_call_is_one_file_and_a_small_one_is_in_the_rows(tmp_path: Path) -> None:
    it = LedgerUnderTest(SqliteStore(tmp_path, large_call_bytes=2_000))
    it.create(max_staleness=None)
    it.submit("small", "large", "larger")
    small, large, larger = it.lease(3)
    it.put([small])
    assert not list((tmp_path / "payloads").iterdir())
    it.do(it.ledger.put(it.now, [complete(group, text="x" * 1_000) for group in (large, larger)]))
    (file,) = (tmp_path / "payloads").iterdir()
    assert [len(payload) for payload in it.store.read_payloads(records_of(it))] == [
        record.payload_bytes for record in records_of(it)
    ]
    it.do(it.ledger.drop(it.now, "train", "first", [large.group_id], "poison"))
    assert file.exists()
    it.do(it.ledger.drop(it.now, "train", "second", [larger.group_id], "poison"))
    assert not file.exists()
    assert len(it.store.read_payloads(records_of(it))) == 2
    it.store.close()


def test_what_no_row_names_is_deleted_at_a_start(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path, large_call_bytes=1))
    records = records_of(it)
    it.store.close()
    files = set((tmp_path / "payloads").iterdir())
    left = tmp_path / "payloads" / f"{'ab' * 16}.payloads"
    left.write_bytes(b"of a call that was never answered")
    (tmp_path / "payloads" / "notes.txt").write_text("not ours")
    store = SqliteStore(tmp_path)
    assert store.load().torn_bytes == len(b"of a call that was never answered")
    assert set((tmp_path / "payloads").iterdir()) == files | {tmp_path / "payloads" / "notes.txt"}
    assert len(store.read_payloads(records)) == len(records)
    store.close()


@pytest.mark.parametrize("harm", ["page", "row"])
def test_where_rows_with_the_places_of_payloads_were_lost_no_file_is_deleted(tmp_path: Path, harm: str) -> None:
    it = busy_ledger(SqliteStore(tmp_path, large_call_bytes=1))
    it.store.close()
    files = {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()}
    assert files
    if harm == "row":
        damage(tmp_path, "UPDATE payload_files SET crc = crc + 1 WHERE rowid = (SELECT MIN(rowid) FROM payload_files)")
    else:
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
            (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'payload_files'").fetchone()
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        with (tmp_path / "ledger.sqlite").open("r+b") as file:
            file.seek((page - 1) * page_bytes)
            file.write(b"\xff" * page_bytes)
    for _ in range(2):  # the second start finds a table that is whole, and the note of the first
        store = SqliteStore(tmp_path)
        assert store.damage()
        assert {name: (tmp_path / "payloads" / name).read_bytes() for name in files} == files
        store.close()


@pytest.mark.parametrize("large_call_bytes", [1, 1 << 20])
def test_a_payload_that_is_lost_or_changed_is_named_and_the_rest_is_served(
    tmp_path: Path, large_call_bytes: int
) -> None:
    it = busy_ledger(SqliteStore(tmp_path, large_call_bytes=large_call_bytes))
    lost, changed, *others = records_of(it)
    (payload,) = it.store.read_payloads([changed])
    it.store.close()
    if large_call_bytes == 1:
        files = {path: path.read_bytes() for path in (tmp_path / "payloads").iterdir()}
        damage(tmp_path, f"DELETE FROM payload_files WHERE key = '{lost.key}'")
        for path, data in files.items():
            path.write_bytes(data.replace(payload, bytes(len(payload))))
    else:
        damage(tmp_path, f"DELETE FROM payloads WHERE key = '{lost.key}'")
        damage(tmp_path, f"UPDATE payloads SET body = zeroblob(length(body)) WHERE key = '{changed.key}'")
    store = SqliteStore(tmp_path)
    store.load()
    assert {found.sample_id for found in store.damage()} == {lost.sample_id}
    for record in (lost, changed):
        with pytest.raises(DataLoss, match=r"headrace buffer drop --group train/\d+ --reason damaged"):
            store.read_payloads([record])
    assert {found.sample_id for found in store.damage()} == {lost.sample_id, changed.sample_id}
    assert len(store.read_payloads(others)) == len(others)
    store.close()


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_missing_or_short_payload_file_is_named_at_the_start_and_the_rest_is_served(
    tmp_path: Path, is_missing: bool
) -> None:
    it = busy_ledger(SqliteStore(tmp_path, large_call_bytes=1))
    records = records_of(it)
    it.store.close()
    file, *_ = (tmp_path / "payloads").iterdir()
    num_bytes = file.stat().st_size - 1
    file.unlink() if is_missing else os.truncate(file, num_bytes)
    what = f"payloads/{file.name} {'is missing' if is_missing else f'has {num_bytes} bytes'}"
    store = SqliteStore(tmp_path)
    store.load()
    victims = {found.sample_id for found in store.damage() if found.what == what}
    assert victims
    for record in records:
        if record.sample_id in victims:
            with pytest.raises(DataLoss, match=f"{what}: headrace buffer drop --group train/"):
                store.read_payloads([record])
        else:
            assert len(store.read_payloads([record])[0]) == record.payload_bytes
    store.close()


def test_damaged_pages_of_payloads_cost_those_payloads_alone(tmp_path: Path) -> None:
    it = LedgerUnderTest(SqliteStore(tmp_path))
    it.create(max_staleness=None)
    it.submit(*(f"q{i}" for i in range(40)))
    for group in it.lease():
        it.do(it.ledger.put(it.now, [complete(group, text="x" * 3_000)]))
    it.store.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        leaf = "SELECT pageno FROM dbstat WHERE name = 'payloads' AND pagetype = 'leaf' ORDER BY pageno LIMIT 1"
        (page,) = connection.execute(leaf).fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    it.store = SqliteStore(tmp_path)
    it.restart()
    with (tmp_path / "ledger.sqlite").open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    it.store.close()
    it.store = SqliteStore(tmp_path)
    it.restart()
    lost = {found.sample_id for found in it.store.damage()} - {None}
    assert lost
    for record in records_of(it):
        if record.sample_id in lost:
            with pytest.raises(DataLoss):
                it.store.read_payloads([record])
        else:
            assert len(it.store.read_payloads([record])[0]) == record.payload_bytes
    it.store.close()


def test_a_payload_that_is_not_the_one_that_was_put_is_data_loss(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    record = next(r for g in it.ledger.stream("train").groups.values() for r in g.records)
    (payload,) = it.store.read_payloads([record])
    assert checked_payload(record, payload) == payload
    with pytest.raises(DataLoss, match="does not match the digest it was put with"):
        checked_payload(record, bytes(payload) + b"x")
    with pytest.raises(NotFound, match="is gone"):
        checked_payload(record, None)
    with pytest.raises(DataLoss, match="does not match the digest it was put with"):
        it.store.read_payloads([replace(record, digest=digest_of(b"another"))])


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("large_call_bytes", [1, 1 << 20])
def test_what_is_put_and_dropped_leaves_no_row_and_no_file(
    tmp_path: Path, large_call_bytes: int, at_once: bool
) -> None:
    it = LedgerUnderTest(SqliteStore(tmp_path, large_call_bytes=large_call_bytes))
    it.create()
    it.submit("a")
    (group,) = it.lease()
    _, put = it.ledger.put(it.now, [complete(group)])
    _, drop = it.ledger.drop(it.now, "train", "request", [group.group_id], "poison")
    for together in [[put, drop]] if at_once else [[put], [drop]]:
        it.store.commit(together)
    it.store.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        assert database.execute("SELECT key FROM samples").fetchall() == []
        assert database.execute("SELECT key FROM payloads UNION SELECT key FROM payload_files").fetchall() == []
    assert not list((tmp_path / "payloads").iterdir())


def test_a_transaction_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("CREATE TABLE numbers (number INTEGER NOT NULL)")
        with pytest.raises(sqlite3.IntegrityError), transaction(database):
            database.executemany("INSERT INTO numbers VALUES (?)", [(1,), (None,)])
        assert database.execute("SELECT * FROM numbers").fetchall() == []
        assert not database.in_transaction


async def test_a_group_whose_partial_samples_cannot_be_read_is_leased_without_them(tmp_path: Path) -> None:
    async with served_buffer(SqliteStore(tmp_path)) as (buffer, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="s", n_samples_per_prompt=1, groups_per_step=2))
        await client.submit_prompts("s", text_prompts("a", "b"))
        for lease in (await client.lease_groups("s", "p", 2)).leases:
            partial = completed_sample(lease, 0, 0).pack()
            await client.release_leases([pb.LeaseRelease(lease_id=lease.lease_id, partial_samples=[partial])])
        (record,) = buffer.ledger.stream("s").groups["s/0"].partials
        damage(tmp_path, f"UPDATE payloads SET body = zeroblob(length(body)) WHERE key = '{record.key}'")
        again = (await client.lease_groups("s", "p", 2)).leases
        assert {lease.group_id: len(lease.partial_samples) for lease in again} == {"s/0": 0, "s/1": 1}


async def test_names_with_slashes_never_share_a_payload(tmp_path: Path) -> None:
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        payloads: dict[tuple[str, str], bytes] = {}
        for stream, sample_id in (("s", "0/x"), ("s/0", "x")):
            await client.create_stream(pb.StreamConfig(name=stream, n_samples_per_prompt=1, groups_per_step=1))
            await client.submit_prompts(stream, text_prompts(f"asked of {stream}"))
            (lease,) = (await client.lease_groups(stream, "p", 1)).leases
            put = complete_put(lease)
            put.samples[0].envelope.sample_id = sample_id
            await client.put_groups([put])
            payloads[stream, sample_id] = put.samples[0].payload
        assert len(set(payloads.values())) == 2
        for (stream, sample_id), payload in payloads.items():
            (sample,) = await client.fetch_samples(stream, [sample_id])
            assert (sample.payload, sample.envelope.group_id) == (payload, f"{stream}/0")


async def test_a_stream_whose_row_is_damaged_is_data_loss_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    async with served_buffer(store) as (_, server), BufferClient(server.address) as client:
        for name in ("one", "two"):
            await client.create_stream(pb.StreamConfig(name=name, n_samples_per_prompt=1, groups_per_step=1))
            await client.submit_prompts(name, text_prompts("a"))
    damage(tmp_path, "UPDATE streams SET crc = crc + 1 WHERE name = 'one'")
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        with pytest.raises(DataLoss, match="row of stream one is damaged"):
            await client.lease_groups("one", "p", 1)
        with pytest.raises(DataLoss, match="row of stream one is damaged"):
            await client.create_stream(pb.StreamConfig(name="one", n_samples_per_prompt=1, groups_per_step=1))
        assert len((await client.lease_groups("two", "p", 1)).leases) == 1
