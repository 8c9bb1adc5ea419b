"""`headrace restart all`: services end and start again, one after the other, and no call of any client fails.

Real launcher, services and rank, which train meanwhile; the engine, which nobody restarts, has no model.
HEADRACE_ROLLING_ROUNDS says how often; `make chaos` does it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.commands.live import ORDER
from headrace.cli.main import main
from headrace.ledger_tools.audit_run import audit_ledger, described
from headrace.rpc.net import free_port
from tests.chaos.rolling_clients import Clients
from tests.support.fakes.gloo_engine import GlooEngine
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

ROUNDS = int(os.environ.get("HEADRACE_ROLLING_ROUNDS", "0"))


def documented_config() -> Mapping[str, Any]:
    """The service config that docs/client.md tells foreign clients to use."""
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    (config,) = [json.loads(block) for block in blocks if "retryPolicy" in block]
    return dict(config)


@asynccontextmanager
async def clients_of(addresses: Mapping[str, str], folder: Path, openai_url: str) -> AsyncIterator[None]:
    """They work while the block does, and not one call of them failed; the ledger's streams of theirs are whole."""
    clients = Clients(addresses, openai_url, documented_config(), folder / "own.jsonl")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.run())
        await clients.until_all_have_called()
        yield
        await clients.until_all_have_called()
        clients.stopping.set()
    print(dict(clients.calls), clients.failed)
    clients.check()
    found = await audit_ledger(addresses["buffer"], "own", folder / "own.jsonl", 60.0, deep=True)
    assert found.verdict.is_clean, described(found)


@pytest.mark.ranks
@pytest.mark.timeout(900 + 300 * ROUNDS)
@pytest.mark.skipif(not ROUNDS, reason="long: HEADRACE_ROLLING_ROUNDS says how often")
async def test_all_services_of_a_run_are_restarted_in_turn_and_no_call_fails(tmp_path: Path) -> None:
    engine, port = GlooEngine(token_seconds=0.02), free_port()
    run = TrainingRun(
        tmp_path, make_tiny_qwen3(tmp_path / "model"),
        "--rollout-external-engine-addrs", engine.url.removeprefix("http://"), "--rollout-num-gpus", "1",
        "--openai-port", str(port),
        "--num-rollout", "100000", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2",
        "--micro-batch-size", "2", "--actor-num-gpus-per-node", "1", "--lr", "1e-6", "--save-interval", "50",
        "--rollout-max-response-len", "8", "--rm-type", "exact_match", "--update-weight-probe-tolerance", "1e6",
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        await engine.start(seconds=60)
        stack.push_async_callback(engine.stop)
        await stack.enter_async_context(run.started())
        await run.until_step(2)
        addresses = {name: entry.address for name, entry in run.folder.services().items()}
        async with clients_of(addresses, tmp_path, f"http://127.0.0.1:{port}"):
            for _ in range(ROUNDS):
                assert await asyncio.to_thread(main, ["restart", "all", str(run.folder.path)]) == 0
                await run.until_step(run.metrics()[-1]["step"] + 2)
    asked = re.findall(r"(\w+) is restarted, as somebody asked", run.log.read_text())
    assert asked == [*ORDER] * ROUNDS
    steps = [row["step"] for row in run.metrics() if "loss/policy" in row]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost or trained twice"
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path), "--deep"]) == 0
