"""The store in a folder: SQLite for the rows, append-only files for the payloads."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.digest import digest_of
from headrace.errors import ConfigError, DataLoss, NotFound
from headrace.job.schema.services import BufferSection
from services.buffer.ledger.transaction import Transaction
from services.buffer.store.base import Damage
from services.buffer.store.files import DiskFiles
from services.buffer.store.kinds import open_store
from services.buffer.store.payload import checked_payload
from services.buffer.store.sqlite.database import connect
from services.buffer.store.sqlite.position_mark import PositionMark
from services.buffer.store.sqlite.store import SqliteStore
from services.buffer.store.sqlite.writing import transaction
from tests.contract.buffer.test_buffer_stores import busy_ledger
from tests.support.faults.durable_points import image
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete
from tests.support.processes.buffer_server import served_buffer


def test_a_folder_of_the_segment_store_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    with pytest.raises(ConfigError, match="buffer_store segments, which this headrace does not read: finish the run"):
        open_store(BufferSection(), tmp_path, "run")


def test_the_segment_store_is_refused_by_a_sentence_that_names_sqlite() -> None:
    with pytest.raises(ValueError, match="set buffer_store to sqlite"):
        BufferSection.model_validate({"buffer_store": "segments"})
    assert BufferSection().buffer_store == "sqlite"


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


@pytest.mark.parametrize("table", ["groups", "prompts", "samples"])
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


def test_a_damaged_page_of_the_history_keeps_no_command_from_being_durable(tmp_path: Path) -> None:
    it = LedgerUnderTest(SqliteStore(tmp_path))
    it.create(max_staleness=None)
    epoch = it.rewind()
    for version in range(1, 400):
        it.serve(epoch, version)
    it.store.close()
    file = tmp_path / "ledger.sqlite"
    data = bytearray(file.read_bytes())
    of_history = [i for i in range(0, len(data), 4096) if data[i : i + 4096].count(b"policy_version") > 10]
    data[of_history[1] : of_history[1] + 64] = b"\xff" * 64
    file.write_bytes(data)
    it.store, it.retain_events = SqliteStore(tmp_path), 16
    it.restart()
    for version in range(400, 420):
        it.serve(epoch, version)
    last = it.ledger.position
    assert [event.position for event in it.store.read_events(last - 15, 16)] == list(range(last - 15, last + 1))
    it.store.close()
    it.store = SqliteStore(tmp_path)
    it.restart()
    assert (it.ledger.position, it.ledger.stream("train").state.policy_version) == (last, 419)
    it.store.close()


@pytest.mark.parametrize("harm", ["DELETE FROM events", "UPDATE events SET crc = crc + 1"])
def test_a_line_of_the_history_that_is_missing_or_changed_is_data_loss(tmp_path: Path, harm: str) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    damage(tmp_path, f"{harm} WHERE position = 5")
    with pytest.raises(DataLoss, match="event 5 of the history is damaged: watch from position 6"):
        it.store.read_events(1, 100)
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


def test_what_no_row_names_is_cut_off_and_deleted(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    records = [r for g in it.ledger.stream("train").groups.values() for r in g.records]
    it.store.close()
    (file,) = (tmp_path / "payloads").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole + b"half a record")
    file.with_name(f"{'ab' * 16}.payloads").write_bytes(whole)
    file.with_name("notes.txt").write_text("not ours")
    store = SqliteStore(tmp_path)
    assert store.load().torn_bytes == len(b"half a record")
    assert file.read_bytes() == whole
    assert {path.name for path in (tmp_path / "payloads").iterdir()} == {file.name, "notes.txt"}
    assert len(store.read_payloads(records)) == len(records)
    store.close()


@pytest.mark.parametrize("harm", ["page", "row"])
def test_where_places_of_payloads_were_lost_compaction_deletes_none_of_the_files_that_may_hold_them(
    tmp_path: Path, harm: str
) -> None:
    it = busy_ledger(SqliteStore(tmp_path, file_bytes=100))
    it.store.close()
    files = {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()}
    assert files
    if harm == "row":
        one = "(file_id, offset) = (SELECT file_id, offset FROM payloads)"
        damage(tmp_path, f"UPDATE payloads SET file_id = zeroblob(16) WHERE {one}")
    else:
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
            (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'payloads'").fetchone()
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        with (tmp_path / "ledger.sqlite").open("r+b") as file:
            file.seek((page - 1) * page_bytes)
            file.write(b"\xff" * page_bytes)
    for _ in range(2):  # the second start finds a table that is whole, and the mark of the first
        store = SqliteStore(tmp_path, file_bytes=100)
        assert store.damage()
        store.compact()
        assert {name: (tmp_path / "payloads" / name).read_bytes() for name in files} == files
        store.close()


def test_payload_files_without_their_database_are_not_taken_for_a_new_ledgers(tmp_path: Path) -> None:
    busy_ledger(SqliteStore(tmp_path)).store.close()
    for name in ("ledger.sqlite", "position"):
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()}
    assert before
    with pytest.raises(DataLoss, match=r"ledger\.sqlite is gone, .*: move .* away and restore a backup with"):
        SqliteStore(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "payloads").iterdir()} == before


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


def test_a_missing_payload_file_is_named_at_the_start_and_the_rest_is_served(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path, file_bytes=1))
    records = [r for g in it.ledger.stream("train").groups.values() for r in g.records]
    it.store.close()
    lost, *_ = (tmp_path / "payloads").iterdir()
    data = lost.read_bytes()
    lost.unlink()
    store = SqliteStore(tmp_path, file_bytes=1)
    assert [damage.what for damage in store.damage()][:1] == [f"payloads/{lost.name} is missing"]
    store.load()
    store.scrub()
    victims = {r.sample_id for r in records if r.key.encode() in data}
    assert victims
    assert {damage.sample_id for damage in store.damage()} == {None, *victims}
    for record in records:
        if record.sample_id in victims:
            with pytest.raises(DataLoss, match="is damaged: headrace buffer drop --group train/"):
                store.read_payloads([record])
        else:
            assert len(store.read_payloads([record])[0]) == record.payload_bytes
    store.close()


def test_what_dies_while_its_file_is_compacted_is_not_brought_back(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    it = busy_ledger(store)
    (file,) = (tmp_path / "payloads").iterdir()
    extents = store.extents_of(bytes.fromhex(file.stem))
    group = next(g for g in it.ledger.stream("train").groups.values() if g.step == 1)
    dying = [r.key for r in group.samples]
    store.commit([Transaction(groups={}, deleted_payloads=dying)])
    assert store.move(extents) > 0
    with pytest.raises(NotFound):
        store.read_payloads(group.samples)
    store.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        bodies = b"".join(body for (body,) in database.execute("SELECT body FROM payloads"))
    assert not any(key.encode() in bodies for key in dying)


def test_what_died_of_an_extent_stays_dead_when_the_rest_of_it_is_moved(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    it = busy_ledger(store)
    (file,) = (tmp_path / "payloads").iterdir()
    dead, alive = next(g for g in it.ledger.stream("train").groups.values() if g.step == 1).samples
    store.commit([Transaction(groups={}, deleted_payloads=[dead.key])])
    assert store.move(store.extents_of(bytes.fromhex(file.stem))) > 0
    assert [len(payload) for payload in store.read_payloads([alive])] == [alive.payload_bytes]
    with pytest.raises(NotFound):
        store.read_payloads([dead])
    store.close()


def test_a_payload_is_not_moved_where_the_row_that_names_it_is_gone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    busy_ledger(store)
    (file,) = (tmp_path / "payloads").iterdir()
    extents = store.extents_of(bytes.fromhex(file.stem))
    damage(tmp_path, "DELETE FROM payloads WHERE offset = (SELECT MAX(offset) FROM payloads)")
    with pytest.raises(DataLoss, match=f"{len(extents) - 1} of {len(extents)} locations that rows of .* should name"):
        store.move(extents)
    store.close()


def test_a_place_that_is_not_the_one_that_was_written_is_damage(tmp_path: Path) -> None:
    busy_ledger(SqliteStore(tmp_path)).store.close()
    damage(tmp_path, "UPDATE payloads SET offset = offset + 1 WHERE offset = (SELECT MAX(offset) FROM payloads)")
    store = SqliteStore(tmp_path)
    assert [found.what.partition(",")[0] for found in store.damage()] == ["a row with the location of payloads"]
    store.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_put_and_dropped_leaves_no_row(tmp_path: Path, at_once: bool) -> None:
    it = LedgerUnderTest(SqliteStore(tmp_path))
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
        assert database.execute("SELECT offset FROM payloads").fetchall() == []


def test_a_transaction_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("CREATE TABLE numbers (number INTEGER NOT NULL)")
        with pytest.raises(sqlite3.IntegrityError), transaction(database):
            database.executemany("INSERT INTO numbers VALUES (?)", [(1,), (None,)])
        assert database.execute("SELECT * FROM numbers").fetchall() == []
        assert not database.in_transaction


def test_what_is_prepared_is_not_there_before_its_commit(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path / "run"))
    it.submit("prepared")
    groups = it.lease()
    _, put = it.ledger.put(it.now, [complete(group) for group in groups])
    it.store.prepare([put])
    killed = SqliteStore(image(tmp_path / "run", tmp_path / "killed"))
    snapshot = killed.load()
    assert snapshot.torn_bytes > 0
    records = [record for group_id in put.groups for record in put.groups[group_id].records]
    held = {record.key for group in snapshot.groups for record in group.records}
    assert not held & {record.key for record in records}
    assert killed.damage() == []
    killed.close()
    it.store.commit([put])
    assert [bytes(p) for p in it.store.read_payloads(records)] == [put.payloads[r.key] for r in records]
    it.store.close()


def test_a_file_whose_payloads_wait_for_their_row_is_neither_emptied_nor_deleted(tmp_path: Path) -> None:
    it = busy_ledger(store := SqliteStore(tmp_path, file_bytes=1))
    it.submit("first", "second")
    first, second = (it.ledger.put(it.now, [complete(group)])[1] for group in it.lease(2))
    it.store.prepare([first])
    it.store.prepare([second])  # in a file of its own: the first one's is sealed
    store.compact()
    waiting = [bytes.fromhex(path.stem) for path in (tmp_path / "payloads").iterdir()]
    assert not any(store.delete_unnamed(file_id) for file_id in waiting)
    it.store.commit([first])
    it.store.commit([second])
    store.compact()
    for one in (first, second):
        records = [record for group in one.groups.values() for record in group.records]
        assert [bytes(p) for p in it.store.read_payloads(records)] == [one.payloads[r.key] for r in records]
    it.store.close()


def test_the_file_that_is_written_to_is_left_to_itself_and_compacted_once_it_is_sealed(tmp_path: Path) -> None:
    it = busy_ledger(store := SqliteStore(tmp_path, file_bytes=900))
    (file,) = (tmp_path / "payloads").iterdir()
    num_bytes = file.stat().st_size
    kept, *dying = (r for g in it.ledger.stream("train").groups.values() for r in g.records)
    it.store.commit([Transaction(groups={}, deleted_payloads=[record.key for record in dying])])
    assert (store.compact(), file.stat().st_size) == (0, num_bytes)
    it.put(it.lease(2))
    assert file.stat().st_size > 900
    it.put(it.lease(1))
    store.compact()
    assert not file.exists()
    assert [len(payload) for payload in it.store.read_payloads([kept])] == [kept.payload_bytes]
    it.store.close()


def test_a_damaged_payload_stays_where_it_is_and_its_file_is_not_counted_as_deleted(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    it.store.close()
    (file,) = (tmp_path / "payloads").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store = SqliteStore(tmp_path)
    assert store.compact() == 0
    assert file.read_bytes() == data
    store.close()


def test_what_ends_the_compactor_is_raised_by_the_next_commit(tmp_path: Path) -> None:
    class NoAnswer(DiskFiles):
        def free_bytes(self) -> int:
            raise OSError(errno.EIO, "the disk says nothing")

    busy_ledger(SqliteStore(tmp_path)).store.close()
    others = set(threading.enumerate())
    it = LedgerUnderTest(SqliteStore(tmp_path, open_files=NoAnswer))
    it.restart()
    it.submit("begins a file")
    it.put(it.lease())
    (compactor,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "compactor")
    records = [r for g in it.ledger.stream("train").groups.values() for r in g.records]
    it.store.commit([Transaction(groups={}, deleted_payloads=[record.key for record in records[1:]])])
    compactor.join()
    with pytest.raises(OSError, match="the disk says nothing"):
        it.submit("later")
    it.store.close()


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


async def test_damage_is_in_the_stats_and_the_rest_is_served(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    it.store.close()
    damage(tmp_path, "UPDATE groups SET crc = crc + 1 WHERE group_id = 'train/5'")
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        (found,) = await client.damage()
        assert (found.what, found.group_id) == ("the row groups/train/5 is damaged", "train/5")
        assert sum((await client.stats("train")).groups.values()) == 11


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
