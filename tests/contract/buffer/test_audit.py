"""`headrace audit` over a buffer that lives and over one that was killed."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.disk import lock
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from services.buffer.store.memory import MemoryStore
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put
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


def test_an_audit_in_json_has_its_verdict_and_its_amounts(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["audit", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clean"] is True
    assert found["verdict"] == {"lost": [], "doubled": [], "unaccounted": [], "others": []}
    assert (found["num_steps"], found["num_payloads"]) == (5, None)


def test_a_record_that_is_gone_is_missed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.training_record.unlink()
    assert main(["audit", str(run.path)]) == 1
    said = capsys.readouterr().err
    assert "does not exist, and the ledger says that the steps 0 to 4 were trained" in said


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


def test_it_writes_nothing_into_the_runs_folder(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    torn(run)
    capsys.readouterr()
    before = everything_in(run.path)
    assert main(["audit", str(run.path), "--deep"]) == 0
    assert everything_in(run.path) == before
    assert "lost, doubled, unaccounted: 0 0 0" in capsys.readouterr().out


def test_a_ledger_that_another_buffer_has_open_is_not_copied(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(run.path)
    with (run.ledger / "lock").open("rb") as held:
        assert lock(held)
        assert main(["audit", str(run.path)]) == 1
    assert "is in use by another buffer" in capsys.readouterr().err
    assert everything_in(run.path) == before
