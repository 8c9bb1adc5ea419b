"""`headrace restart`: services end and start again under load, and no call of any client fails.

HEADRACE_ROLLING_ROUNDS restarts all services of a whole run so many times, one after the other, while it trains.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.commands.audit import audit_ledger, described
from headrace.cli.job_arguments import load_job
from headrace.cli.main import main
from headrace.launch.health import is_serving
from headrace.launch.launcher import Launcher
from headrace.rpc.net import free_port
from tests.e2e.test_rollout_services import Engine
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun
from tests.support.rolling.clients import Clients
from tests.support.rolling.stubs import Stubs
from tests.support.rolling.tally import Tally

ROUNDS = int(os.environ.get("HEADRACE_ROLLING_ROUNDS", "0"))


def documented_config() -> Mapping[str, Any]:
    """The service config that docs/client.md tells foreign clients to use."""
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    (config,) = [json.loads(block) for block in blocks if "retryPolicy" in block]
    return dict(config)


@asynccontextmanager
async def clients_of(addresses: Mapping[str, str], folder: Path, openai_url: str | None = None) -> AsyncIterator[None]:
    """They work while the block does, and not one call of them failed; the ledger's streams of theirs are whole."""
    tally = Tally()
    users = Clients(addresses, openai_url, tally, folder / "own.jsonl")
    foreign = Stubs(addresses, documented_config(), tally)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(users.run())
        tasks.create_task(foreign.run())
        await tally.until_all_have_called(addresses)
        yield
        await tally.until_all_have_called(addresses)
        users.stopping.set()
        foreign.stopping.set()
    print("\n".join(tally.lines()))
    assert not tally.failed
    found = await audit_ledger(addresses["buffer"], "own", folder / "own.jsonl", 60.0, deep=True)
    assert found.verdict.is_clean, described(found)
    users.check()
    foreign.check()


async def restarted(service: str, run: Path) -> None:
    assert await asyncio.to_thread(main, ["restart", service, str(run)]) == 0


async def test_buffer_and_reward_are_restarted_under_load_and_no_call_fails(tmp_path: Path) -> None:
    told: list[str] = []
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    job = load_job(
        ["--run-dir", str(tmp_path), "--run-name", "r", "--hf-checkpoint", str(checkpoint), "--rm-type", "exact_match",
         "--prompt-data", str(prompts), "--label-key", "label", "--rollout-batch-size", "2",
         "--n-samples-per-prompt", "2"]
    )  # fmt: skip
    launcher = Launcher(job, ["buffer", "reward"], told.append)
    running = asyncio.create_task(launcher.run())
    try:
        addresses = {name: launcher.address_of(name) for name in ("buffer", "reward")}
        while not all([await is_serving(address) for address in addresses.values()]):
            assert not running.done()
            await asyncio.sleep(0.05)
        async with clients_of(addresses, tmp_path):
            await restarted("all", tmp_path / "r")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    asked = [line.split()[0] for line in told if "as somebody asked" in line]
    assert asked == ["reward", "buffer"]


@pytest.mark.skipif(not ROUNDS, reason="long: make chaos sets HEADRACE_ROLLING_ROUNDS")
@pytest.mark.ranks
@pytest.mark.timeout(7200)
async def test_all_services_of_a_run_are_restarted_in_turn_and_no_call_fails(tmp_path: Path) -> None:
    engine, port = Engine(token_seconds=0.02), free_port()
    run = TrainingRun(
        tmp_path, make_tiny_qwen3(tmp_path / "model"),
        "--rollout-external-engine-addrs", engine.address, "--rollout-num-gpus", "1", "--openai-port", str(port),
        "--num-rollout", "100000", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2",
        "--micro-batch-size", "2", "--actor-num-gpus-per-node", "1", "--lr", "1e-6", "--save-interval", "50",
        "--rollout-max-response-len", "8", "--rm-type", "exact_match", "--update-weight-probe-tolerance", "1e6",
    )  # fmt: skip
    async with engine.running(), run.started():
        await run.until_step(2)
        addresses = {name: entry.address for name, entry in run.folder.services().items()}
        async with clients_of(addresses, tmp_path, f"http://127.0.0.1:{port}"):
            for _ in range(ROUNDS):
                await restarted("all", run.folder.path)
                await run.until_step(run.metrics()[-1]["step"] + 2)
    steps = [row["step"] for row in run.metrics() if "loss/policy" in row]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost or trained twice"
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path), "--deep"]) == 0
