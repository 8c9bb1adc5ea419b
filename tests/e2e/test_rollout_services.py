"""A run over two rollout services that `--rollout-services 2` starts: one is killed, the run goes on, nothing is lost.

Real launcher, buffer, routers, producers, engines and Megatron rank. `make chaos` runs it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.cli.main import main
from headrace.client.open import open_rollout
from headrace.client.rollout import RolloutClient
from headrace.errors import HeadraceError
from tests.long_forms import whole_run
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun
from tests.support.processes.with_constants import python_with

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(1800)]

FLAGS = (
    *("--rollout-services", "2", "--rollout-num-gpus", "1", "--num-rollout", "100000", "--rollout-batch-size", "4"),
    *("--n-samples-per-prompt", "2", "--micro-batch-size", "2", "--actor-num-gpus-per-node", "1", "--lr", "1e-6"),
    *("--rollout-max-response-len", "8", "--rollout-health-check-interval", "0.2"),
    *("--buffer-python", python_with("services.buffer.build:LEASE_SECONDS=3.0")),
)


@whole_run
async def test_a_run_goes_on_without_a_rollout_service_whose_engines_are_killed_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scripted_reward(score(1.0)) as reward:
        run = run_of(tmp_path, reward.address)
        async with run.started():
            await run.until_step(2)
            async with open_rollout(await run.address_of("rollout")) as rollout:
                run.kill("rollout-0")
                last = run.metrics()[-1]["step"]
                await run.until_step(last + 4)
                await until_it_produces(run, rollout.services[0], last)
                fleet = await rollout.get_fleet()
                asked = await asyncio.to_thread(printed, capsys, "generate", "--run", str(run.folder.path), "1 + 1")
    assert (
        len({engine.weights_digest for engine in fleet.engines if engine.policy_version == fleet.policy_version}) == 1
    )
    assert "policy version" in asked
    await nothing_is_lost(run, capsys)


def run_of(folder: Path, reward_address: str, *flags: str) -> TrainingRun:
    checkpoint = make_tiny_qwen3(folder / "model")
    return TrainingRun(folder, checkpoint, *FLAGS, "--reward-address", reward_address, *flags)


async def until_it_produces(run: TrainingRun, service: RolloutClient, last: int) -> None:
    """Waits until a service that started again has put groups, with newer weights than those of step `last`."""
    while not ((fleet := await fleet_of(service)) and fleet.groups_produced):
        assert run.is_running, run.last_words()
        await asyncio.sleep(0.05)
    assert fleet.policy_version > last


async def fleet_of(service: RolloutClient) -> pb.GetFleetResponse | None:
    try:
        return await service.get_fleet(deadline_seconds=1.0)
    except HeadraceError:
        return None


async def nothing_is_lost(run: TrainingRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Both services took part in publications, then one alone, then both again."""
    took_part = [row["publish/services"] for row in run.metrics() if "publish/services" in row]
    assert took_part.count(1.0) >= 3, "nobody waited for it"
    assert took_part[-1] == 2.0
    assert "rollout-0 ended with signal 9 (killed: out of memory?" in run.log.read_text()
    verdict = await asyncio.to_thread(printed, capsys, "audit", str(run.folder.path), "--deep")
    assert "lost, doubled, unaccounted: 0 0 0" in verdict


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says, which does not fail."""
    assert main(list(words)) == 0
    return capsys.readouterr().out
