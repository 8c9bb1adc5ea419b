"""`headrace audit` over a buffer that lives and over one that was killed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.commands.audit import audit_ledger
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.errors import Unavailable
from headrace.ledger_tools.audit.ledger import read_ledger
from headrace.ledger_tools.audit.record import read_record
from headrace.ledger_tools.audit.verdict import verdict_of
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from services.buffer.ledger.transaction import LedgerEvent
from services.buffer.store.memory import MemoryStore
from services.trainer.data.record import TrainingRecord
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


@pytest.fixture
async def run(tmp_path: Path) -> RunFolder:
    """A run of five steps whose buffer was killed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    folder = RunFolder(tmp_path)
    process = BufferProcess(tmp_path, prompts)
    await process.start()
    folder.write_services({"buffer": ServiceEntry(process.address, None, None)})
    async with BufferClient(process.address) as client:
        await trained(client, TrainingRecord(folder.training_record), 5)
    assert await asyncio.to_thread(main, ["audit", str(tmp_path)]) == 0
    await process.kill()
    folder.write_services({"buffer": ServiceEntry(process.address, None, 2**22 + 1)})
    return folder


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
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    assert main(["audit", str(run.path)]) == 0
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
