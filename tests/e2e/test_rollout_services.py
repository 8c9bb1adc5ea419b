"""A run over two rollout services that `--rollout-services 2` starts: one is killed, the run goes on, nothing is lost.

Real launcher, buffer, reward service, routers, producers and Megatron rank; only the engines have no model.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.cli.main import main
from headrace.client.open import open_rollout
from headrace.client.rollout import RolloutClient
from headrace.errors import HeadraceError
from headrace.rpc.net import free_port
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(900)]

FLAGS = (
    *("--rollout-services", "2", "--rollout-num-gpus", "1", "--num-rollout", "100000", "--rollout-batch-size", "4"),
    *("--n-samples-per-prompt", "2", "--micro-batch-size", "2", "--actor-num-gpus-per-node", "1", "--lr", "1e-6"),
    *("--rm-type", "math", "--update-weight-probe-tolerance", "1e6", "--rollout-max-response-len", "8"),
    *("--rollout-health-check-interval", "0.2", "--reward-workers", "1", "--lease-seconds", "3"),
)


class Engine:
    """A process of its own, which outlives its rollout service."""

    def __init__(self, folder: Path) -> None:
        self.port = str(free_port())
        self._log = folder / f"engine-{self.port}.log"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        with self._log.open("a") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.fakes.gloo_engine", self.port), cwd=ROOT, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def fleet_of(client: RolloutClient) -> pb.GetFleetResponse | None:
    try:
        return await client.get_fleet(deadline_seconds=1.0)
    except HeadraceError:
        return None


async def test_a_run_goes_on_without_a_rollout_service_that_is_killed_and_takes_it_in_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    addresses = [f"127.0.0.1:{engine.port}" for engine in (first, second)]
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    run = TrainingRun(tmp_path, checkpoint, *FLAGS, "--rollout-external-engine-addrs", *addresses)
    folder = str(run.folder.path)
    async with first.running() as engine, second.running(), AsyncExitStack() as later:
        async with run.started():
            await run.until_step(2)
            async with open_rollout(await run.address_of("rollout")) as rollout:
                run.kill("rollout-0")
                engine.kill()  # without it the service that the launcher starts again has none yet
                last = run.metrics()[-1]["step"]
                await run.until_step(last + 4)
                await engine.wait()
                await later.enter_async_context(first.running())
                while not ((fleet := await fleet_of(rollout.services[0])) and fleet.groups_produced):
                    assert run.is_running, run.last_words()
                    await asyncio.sleep(0.05)
                assert fleet.policy_version > last
                other = await rollout.services[1].get_fleet()
                assert other.groups_produced
                said = await asyncio.to_thread(printed, capsys, "status", folder)
                asked = await asyncio.to_thread(printed, capsys, "generate", "--run", folder, "1 + 1")
        assert re.findall(r"^ *(rollout-\d) +127\.0\.0\.1:\d+ +\d+ +engine-0 ", said, re.M) == [
            "rollout-0",
            "rollout-1",
        ]
        assert re.search(r"^ *rollout +2 services +– +rollout-0/engine-0 \w+ version ", said, re.M)
        assert "policy version" in asked
    took_part = [row["publish/services"] for row in run.metrics() if "publish/services" in row]
    assert took_part[0] == 2.0
    assert took_part.count(1.0) >= 3, "nobody waited for it"
    assert took_part[-1] == 2.0
    assert "rollout-0 ended with signal 9: restart 1" in run.log.read_text()
    verdict = await asyncio.to_thread(printed, capsys, "audit", folder, "--deep")
    assert "lost, doubled, unaccounted: 0 0 0" in verdict
    assert {path.name for path in run.folder.logs.iterdir() if path.is_dir()} == {"rollout-0", "rollout-1"}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says, which does not fail."""
    assert main(list(words)) == 0
    return capsys.readouterr().out
