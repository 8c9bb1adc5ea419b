"""`headrace audit` over a buffer that lives and over one that was killed."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.disk import lock
from headrace.errors import HeadraceError, Unavailable
from headrace.ledger_tools.audit import read_record, verdict_of
from headrace.ledger_tools.audit_run import audit_ledger, read_ledger
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from services.buffer.ledger.group import SampleRecord
from services.buffer.ledger.stream import StreamState
from services.buffer.ledger.transaction import LedgerEvent
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sql import checksum
from services.buffer.store.sqlite import SqliteStore
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess, served_buffer


async def trained(client: BufferClient, record: TrainingRecord, steps: int) -> None:
    """Produces and trains some steps, as producers and a trainer would; the last one is not committed."""
    epoch = (await client.rewind("train", 0)).epoch
    for step in range(steps):
        leases = (await client.lease_groups("train", "p", 100)).leases
        if leases:
            await client.put_groups([complete_put(lease) for lease in leases])
        reply = await client.lease_batch("train", epoch, step, timeout_seconds=10)
        record.append(step, Batch.of(reply))
        await client.consume("train", epoch, step, reply.digest)
        await client.commit("train", epoch, step)
        await client.set_policy_version("train", epoch, step + 1)


async def killed_run(path: Path) -> RunFolder:
    """A run of five steps whose buffer was killed."""
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    folder = RunFolder(path)
    process = BufferProcess(path, prompts)
    await process.start()
    folder.write_services({"buffer": ServiceEntry(process.address, None, None)})
    async with BufferClient(process.address) as client:
        await trained(client, TrainingRecord(folder.training_record), 5)
    assert await asyncio.to_thread(main, ["audit", str(path)]) == 0
    await process.kill()
    folder.write_services({"buffer": ServiceEntry(process.address, None, 2**22 + 1)})
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return asyncio.run(killed_run(tmp_path_factory.mktemp("killed")))


@pytest.fixture
def run(killed: RunFolder, tmp_path: Path) -> RunFolder:
    """The killed run, for a test to change."""
    shutil.copytree(killed.path, tmp_path, dirs_exist_ok=True)
    return RunFolder(tmp_path)


def test_a_clean_run_says_three_zeros(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["audit", str(run.path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("5 steps were fed 40 samples")
    assert second == "lost, doubled, unaccounted: 0 0 0"


def test_a_tampered_record_is_told_by_sample(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in run.training_record.read_text().splitlines()]
    lost, doubled = rows[2]["sample_ids"][0], rows[1]["sample_ids"][0]
    rows[2]["sample_ids"][0] = "nobody's"
    rows[3]["sample_ids"].append(doubled)
    run.training_record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["audit", str(run.path)]) == 1
    said = capsys.readouterr().out
    assert "lost, doubled, unaccounted: 1 1 2" in said
    for line in (f"lost: {lost}", f"doubled: {doubled}", "unaccounted: nobody's", f"unaccounted: {doubled}"):
        assert line in said.splitlines()


def test_a_record_that_is_gone_is_missed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.training_record.unlink()
    assert main(["audit", str(run.path)]) == 1
    said = capsys.readouterr().err
    assert "does not exist, and the ledger says that the steps 0 to 4 were trained" in said


def test_a_prompt_file_that_changed_does_not_keep_a_ledger_from_its_audit(
    killed: RunFolder, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = killed.path / "prompts.jsonl"  # the ledger names it
    before = prompts.read_text()
    prompts.write_text('{"prompt": "another"}\n')
    try:
        assert main(["audit", str(run.path)]) == 0
    finally:
        prompts.write_text(before)
    assert "lost, doubled, unaccounted: 0 0 0" in capsys.readouterr().out


async def test_two_empty_records_are_no_clean_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        folder.write_services({"buffer": ServiceEntry(server.address, None, None)})
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2))
        for text in ("", "\n"):
            folder.training_record.write_text(text)
            assert await asyncio.to_thread(main, ["audit", str(tmp_path)]) == 1
            assert "nothing to audit" in capsys.readouterr().err
        folder.training_record.unlink()
        assert await asyncio.to_thread(main, ["audit", str(tmp_path)]) == 1
        assert "nothing was trained yet" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["audit", str(tmp_path), "--stream", "other"]) == 1
        assert "there is no stream 'other' to audit" in capsys.readouterr().err


def test_a_buffer_that_cannot_be_reached_is_waited_for_with_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, and never says a word
        for port in (silent.getsockname()[1], free_port()):
            folder.write_services({"buffer": ServiceEntry(f"127.0.0.1:{port}", None, None)})
            assert main(["audit", str(tmp_path), "--timeout-seconds", "0.5"]) == 1
            assert f"the buffer at 127.0.0.1:{port} does not answer within 0.5 s" in capsys.readouterr().err


async def test_a_buffer_that_stops_in_the_middle_of_its_history_is_told(tmp_path: Path) -> None:
    store = Stopping()
    async with served_buffer(store) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2))
        await client.submit_prompts("train", text_prompts(*(f"q{i}" for i in range(1500))))
    async with served_buffer(store) as (_, server):
        with pytest.raises(Unavailable, match="does not answer within 0.5 s"):
            await audit_ledger(server.address, "train", tmp_path / "trained.jsonl", 0.5)


class Stopping(MemoryStore):
    """Its disk hangs behind the first page of the history."""

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        return super().read_events(from_position, 1000) if from_position == 1 else _hang()


def _hang() -> list[LedgerEvent]:
    time.sleep(3.0)
    return []


async def test_groups_that_a_step_makes_the_ledger_forget_while_it_is_read_are_not_lost(tmp_path: Path) -> None:
    config = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=8, retain_steps=1)
    file = tmp_path / "trained.jsonl"
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as trainer:
        await trainer.create_stream(config)
        await trainer.submit_prompts("train", text_prompts(*map(str, range(8))))
        await trained(trainer, TrainingRecord(file), 3)

        class Meanwhile(BufferClient):
            """Its trainer commits when the history has been read."""

            async def list_groups(self, *args: Any, **kwargs: Any) -> pb.ListGroupsResponse:
                await trainer.commit("train", 1, 3)
                return await super().list_groups(*args, **kwargs)

        async with Meanwhile(server.address) as client:
            ledger = await read_ledger(client, "train", 20.0)
        verdict = verdict_of([ledger], read_record(file))
    assert len(ledger.groups) < len(ledger.replay.groups)
    assert verdict.is_clean


class Tampered:
    """The rows of a ledger in SQLite, changed with right checksums: as a fault of a program leaves them."""

    def __init__(self, ledger: Path) -> None:
        self._database = ledger / "ledger.sqlite"

    def change_state(self, change: Callable[[StreamState], StreamState]) -> None:
        self._change("streams", "name", "train", lambda body: encode(change(decode(body, type=StreamState))))

    def change_group(self, group_id: str, **values: object) -> None:
        """The row is (fields, keys of samples, keys of partials)."""

        def changed(body: bytes) -> bytes:
            row = decode(body)
            row[0] |= values
            return encode(row)

        self._change("groups", "group_id", group_id, changed)

    def change_sample(self, sample_id: str, change: Callable[[SampleRecord], SampleRecord]) -> None:
        with closing(sqlite3.connect(self._database)) as database:
            rows = database.execute("SELECT key, body FROM samples").fetchall()
        records = {key: decode(body, type=SampleRecord) for key, body in rows}
        (key,) = (key for key, record in records.items() if record.sample_id == sample_id)
        self._change("samples", "key", key, lambda _: encode(change(records[key])))

    def _change(self, table: str, name: str, key: str, change: Callable[[bytes], bytes]) -> None:
        with closing(sqlite3.connect(self._database)) as database, database:
            (body,) = database.execute(f"SELECT body FROM {table} WHERE {name} = ?", (key,)).fetchone()
            new = change(body)
            assert new != body
            values = (new, checksum(key, new), key)
            assert database.execute(f"UPDATE {table} SET body = ?, crc = ? WHERE {name} = ?", values).rowcount == 1


def with_envelope(change: Callable[[sample_pb2.SampleEnvelope], None]) -> Callable[[SampleRecord], SampleRecord]:
    """Changes the envelope, which is what a trainer is given, and nothing else of the row."""

    def changed(record: SampleRecord) -> SampleRecord:
        envelope = sample_pb2.SampleEnvelope.FromString(record.envelope)
        change(envelope)
        return replace(record, envelope=envelope.SerializeToString())

    return changed


def set_reward(envelope: sample_pb2.SampleEnvelope, reward: float | None) -> None:
    if reward is None:
        envelope.ClearField("reward")
    else:
        envelope.reward = reward


def set_range(envelope: sample_pb2.SampleEnvelope, **values: int) -> None:
    for name, value in values.items():
        setattr(envelope.policy_ranges[0], name, value)


SAMPLE_CHANGES: dict[str, Callable[[SampleRecord], SampleRecord]] = {
    "another reward": with_envelope(lambda envelope: set_reward(envelope, 0.0)),
    "no reward": with_envelope(lambda envelope: set_reward(envelope, None)),
    "a newer policy version": with_envelope(lambda envelope: set_range(envelope, policy_version=9)),
    "an older version in the row alone": lambda record: replace(record, oldest_version=-1),
    "a masked range": with_envelope(lambda envelope: set_range(envelope, masked=True)),
    "fewer trained tokens": with_envelope(lambda envelope: setattr(envelope, "trained_tokens", 1)),
    "another status": with_envelope(lambda envelope: setattr(envelope, "status", sample_pb2.SAMPLE_STATUS_ABORTED)),
    "another rollout": with_envelope(lambda envelope: setattr(envelope, "rollout_id", "another")),
}


STATE_CHANGES: dict[str, Callable[[StreamState], StreamState]] = {
    "num_taken + 3": lambda state: replace(state, num_taken=state.num_taken + 3),
    "too few inserted": lambda state: replace(state, num_inserted=state.num_inserted - 5),
    "next_seq one too low": lambda state: replace(state, next_seq=state.next_seq - 1),
    "shares of the sources": lambda state: replace(state, taken=(state.taken[0] + 4,)),
}


@pytest.fixture(scope="module")
async def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of four groups are trained, the last is not committed; two more groups are READY."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(22)))
    store = SqliteStore(folder / "ledger")
    async with served_buffer(store, prompt_root=folder) as (_, server), BufferClient(server.address) as client:
        file = pb.FileSource(path=str(prompts), input_key="prompt")
        await client.create_stream(
            pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=4, max_staleness=1, files=[file])
        )
        await trained(client, TrainingRecord(folder / "trained.jsonl"), 5)
        leases = (await client.lease_groups("train", "p", 100)).leases
        await client.put_groups([complete_put(lease) for lease in leases])
    return folder


async def findings(folder: Path) -> Sequence[str]:
    """What `headrace audit --deep` says about a run."""
    store = SqliteStore(folder / "ledger")
    async with served_buffer(store, prompt_root=folder) as (_, server):
        found = await audit_ledger(server.address, "train", folder / "trained.jsonl", deep=True)
    verdict = found.verdict
    return [*verdict.lost, *verdict.doubled, *verdict.unaccounted, *(each.what for each in verdict.others)]


def trained_samples(folder: Path) -> list[list[str]]:
    """By step."""
    return [json.loads(line)["sample_ids"] for line in (folder / "trained.jsonl").read_text().splitlines()]


@pytest.fixture
def tampered(whole_run: Path, tmp_path: Path) -> tuple[Path, Tampered]:
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder, ignore=shutil.ignore_patterns("lock"))
    return folder, Tampered(folder / "ledger")


async def test_a_run_that_nobody_changed_has_no_findings(tampered: tuple[Path, Tampered]) -> None:
    assert await findings(tampered[0]) == []


@pytest.mark.parametrize("step", [0, 4], ids=["committed", "consumed"])
@pytest.mark.parametrize("change", SAMPLE_CHANGES)
async def test_a_sample_that_would_train_otherwise_is_found(
    tampered: tuple[Path, Tampered], change: str, step: int
) -> None:
    folder, rows = tampered
    rows.change_sample(trained_samples(folder)[step][3], SAMPLE_CHANGES[change])
    assert await findings(folder) != []


async def test_two_groups_that_changed_places_in_a_batch_are_found(tampered: tuple[Path, Tampered]) -> None:
    folder, rows = tampered
    groups = list(dict.fromkeys(sample_id.partition("#")[0] for sample_id in trained_samples(folder)[4]))
    for place, other in ((0, 3), (3, 0)):
        rows.change_group(groups[place], batch_index=other)
    assert await findings(folder) != []


@pytest.mark.parametrize("change", STATE_CHANGES)
async def test_a_counter_that_contradicts_the_groups_is_found(tampered: tuple[Path, Tampered], change: str) -> None:
    folder, rows = tampered
    rows.change_state(STATE_CHANGES[change])
    assert await findings(folder) != []


@pytest.mark.parametrize("next_seq", [0, 21])
async def test_new_prompts_never_take_the_numbers_of_groups_that_are_there(
    tampered: tuple[Path, Tampered], next_seq: int
) -> None:
    folder, rows = tampered
    rows.change_state(lambda state: replace(state, next_seq=next_seq))
    store = SqliteStore(folder / "ledger")
    async with served_buffer(store, prompt_root=folder) as (_, server), BufferClient(server.address) as client:
        before = {group.group_id: group for group in (await client.list_groups("train", page_size=100)).groups}
        new: Sequence[str] | HeadraceError
        try:
            new = await client.submit_prompts("train", text_prompts(*(f"new {i}" for i in range(5))))
        except HeadraceError as error:
            new = error
        assert isinstance(new, Sequence), new
        assert not before.keys() & set(new)
        after = {group.group_id: group for group in (await client.list_groups("train", page_size=100)).groups}
        assert {group_id: after[group_id] for group_id in before} == before


def test_the_command_finds_a_changed_reward(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sample_id = trained_samples(run.path)[2][0]
    Tampered(run.ledger).change_sample(sample_id, SAMPLE_CHANGES["another reward"])
    capsys.readouterr()
    assert main(["audit", str(run.path), "--deep"]) == 1
    assert "digest: line 3 feeds step 2 the batch" in capsys.readouterr().out


def everything_in(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Name of each file and folder → size, time of its last change, bytes."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[str(path)] = (status.st_size, status.st_mtime_ns, content)
    return found


def torn(folder: RunFolder) -> None:
    """A kill in the middle of a put leaves a file that no row names."""
    (folder.ledger / "payloads" / f"{'0' * 32}.payloads").write_bytes(b"half a call")
    (folder.ledger / "columns").mkdir(exist_ok=True)
    (folder.ledger / "columns" / ("a" * 64)).write_bytes(b"a column that no sample names")
    (folder.ledger / "columns" / f"{'b' * 64}.part").write_bytes(b"half a column")


def without_write_ahead_log(folder: RunFolder) -> None:
    """As after an end in order: SQLite has moved all of it into the database."""
    sqlite3.connect(folder.ledger / "ledger.sqlite").close()
    with closing(sqlite3.connect(folder.ledger / "ledger.sqlite")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert not (folder.ledger / "ledger.sqlite-wal").exists()


def of_another_user(folder: RunFolder) -> None:
    for path in folder.path.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (without_write_ahead_log, ["--deep"]),
        (torn, ["--deep"]),
        (of_another_user, ["--deep"]),
    ],
)
def test_it_writes_nothing_into_the_runs_folder(
    run: RunFolder, how: Callable[[RunFolder], None], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    how(run)
    capsys.readouterr()
    before = everything_in(run.path)
    assert main(["audit", str(run.path), *words]) == 0
    after = everything_in(run.path)
    assert sorted(name for name in before | after if before.get(name) != after.get(name)) == []
    assert "lost, doubled, unaccounted: 0 0 0" in capsys.readouterr().out


def test_it_leaves_a_damaged_ledger_as_it_is(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(run.ledger / "ledger.sqlite")) as database, database:
        database.execute(
            "UPDATE payloads SET body = zeroblob(length(body)) WHERE rowid = (SELECT min(rowid) FROM payloads)"
        )
    before = everything_in(run.path)
    assert main(["audit", str(run.path), "--deep"]) == 1
    assert "damaged" in capsys.readouterr().out
    after = everything_in(run.path)
    assert sorted(name for name in before | after if before.get(name) != after.get(name)) == []


def test_a_ledger_that_has_no_room_for_its_copy_is_told_so(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run.path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
    assert main(["audit", str(run.path)]) == 1
    assert "set TMPDIR to a folder on a disk with more room" in capsys.readouterr().err


def test_a_ledger_that_another_buffer_has_open_is_not_copied(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(run.path)
    with (run.ledger / "lock").open("rb") as held:
        assert lock(held)
        assert main(["audit", str(run.path)]) == 1
    assert "is in use by another buffer" in capsys.readouterr().err
    assert everything_in(run.path) == before
