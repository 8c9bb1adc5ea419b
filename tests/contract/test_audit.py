"""`headrace audit` over a buffer that lives and over one that was killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.launch.run_folder import RunFolder, ServiceEntry
from services.trainer.batch import Batch
from services.trainer.record import TrainingRecord
from tests.support.buffer_samples import complete_put
from tests.support.buffer_server import BufferProcess


async def trained(client: BufferClient, record: TrainingRecord, steps: int) -> None:
    """Produces and trains some steps, as producers and a trainer would; the last one is not committed."""
    epoch = (await client.rewind("train", 0)).epoch
    for step in range(steps):
        leases = (await client.lease_groups("train", "p", 100)).leases
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


def test_a_run_that_trained_nothing_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.training_record.unlink()
    assert main(["audit", str(run.path)]) == 1
    assert "nothing was trained here yet" in capsys.readouterr().err


def test_a_ledger_that_cannot_be_opened_says_why(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    assert main(["audit", str(run.path)]) == 1
    assert "has changed since stream train began to walk it" in capsys.readouterr().err
