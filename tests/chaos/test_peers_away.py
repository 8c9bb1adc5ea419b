"""A service whose peer is away, stopped or killed, waits and goes on: nothing is lost, and no restart is used up.

`make chaos` keeps them away for half a minute (HEADRACE_AWAY_SECONDS), and runs a whole training through it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from headrace.job.schema.services import BufferSection
from headrace.rpc.net import free_port
from tests.chaos.workload import working
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import ROOT, BufferProcess
from tests.support.processes.training_run import TrainingRun

AWAY_SECONDS = float(os.environ.get("HEADRACE_AWAY_SECONDS", "3"))
STEPS = 24


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """The process is stopped (SIGSTOP) for AWAY_SECONDS, and goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        await asyncio.sleep(AWAY_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[BufferProcess]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    process = BufferProcess(tmp_path, prompts, buffer=BufferSection(max_staleness=1))
    await process.start()
    try:
        yield process
    finally:
        await process.kill()


async def test_no_lease_ends_because_the_buffer_was_stopped_and_nobody_could_renew_it(buffer: BufferProcess) -> None:
    config = pb.StreamConfig(name="short", n_samples_per_prompt=1, groups_per_step=2, lease_seconds=AWAY_SECONDS / 2)
    async with BufferClient(buffer.address) as client:
        await client.create_stream(config)
        await client.submit_prompts("short", text_prompts("a", "b"))
        leases = (await client.lease_groups("short", "p", 2)).leases
        async with stopped(buffer.pid):
            pass
        results = await client.put_groups([complete_put(lease) for lease in leases])
        assert [result.refused.reason for result in results] == ["", ""]
        assert (await client.stats("short")).groups["READY"] == 2
    assert '"buffer_was_stopped"' in buffer.log


@pytest.mark.timeout(600)
async def test_producers_and_trainers_whose_buffer_is_stopped_or_killed_wait_for_it_and_lose_nothing(
    buffer: BufferProcess, tmp_path: Path
) -> None:
    async with working(buffer, tmp_path) as workload:
        await workload.steps(2)
        async with stopped(buffer.pid):
            pass
        await workload.steps(2)
        await buffer.kill()
        await asyncio.sleep(AWAY_SECONDS)
        await buffer.start()
        await workload.steps(2)


@pytest.mark.skipif("HEADRACE_AWAY_SECONDS" not in os.environ, reason="long: make chaos sets HEADRACE_AWAY_SECONDS")
@pytest.mark.ranks
@pytest.mark.timeout(1800)
async def test_a_trainer_whose_buffer_or_rollout_service_is_away_waits_and_trains_every_step_once(
    tmp_path: Path,
) -> None:
    rollout_address = f"127.0.0.1:{free_port()}"
    run = TrainingRun(
        tmp_path, make_tiny_qwen3(tmp_path / "model"),
        "--rollout-address", rollout_address, "--reward-address", "127.0.0.1:9",
        "--num-rollout", str(STEPS), "--actor-num-gpus-per-node", "1",
        "--update-weight-probe-tolerance", "1e6",  # the engine has no model to compare with
    )  # fmt: skip
    async with run.started():
        buffer_address = await run.address_of("buffer")
        await run.until_serving("trainer")
        await asyncio.sleep(AWAY_SECONDS)  # the rollout service is not there yet
        async with rollout_process(rollout_address, buffer_address, tmp_path) as pid:
            await run.until_step(2)
            buffer_pid = run.folder.services()["buffer"].pid
            assert buffer_pid is not None
            async with stopped(buffer_pid):
                pass
            await run.until_step(len(run.metrics()) + 2)
            async with stopped(pid):
                pass
            await run.until_step(len(run.metrics()) + 2)
        assert run.is_running, run.last_words()
        assert len(run.metrics()) < STEPS, "it was killed in the middle"
        await asyncio.sleep(AWAY_SECONDS)
        async with rollout_process(rollout_address, buffer_address, tmp_path):
            await run.finished()
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    assert "trainer ended" not in run.log.read_text()
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0


@asynccontextmanager
async def rollout_process(address: str, buffer_address: str, folder: Path) -> AsyncIterator[int]:
    """Its pid; `kill -9` when the block is left."""
    with (folder / "rollout.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.fakes.certain_rollout", address, buffer_address,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()
