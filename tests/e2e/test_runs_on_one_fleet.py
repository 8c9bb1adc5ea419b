"""Two runs on one rollout service, and one of them is killed again and again: the other does not notice.

Real launchers, buffers, trainers and one real engine that both share. `make chaos` runs it.
"""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path

import pytest

from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.main import main
from headrace.client.rollout import RolloutClient
from headrace.client.trainer import TrainerClient
from headrace.trajectory import unpack_column
from tests.long_forms import whole_run
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(1800)]

FLAGS = (
    *("--lora-rank", "4", "--update-weight-transport", "adapter", "--num-rollout", "100000", "--lr", "1e-3"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--micro-batch-size", "2", "--save-interval", "2"),
    *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-max-response-len", "8"),
)
KILLS = 4


@whole_run
async def test_a_run_does_not_notice_that_the_trainer_of_another_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    async with scripted_reward(by_chance) as reward:
        words = (*FLAGS, "--reward-address", reward.address)
        host = TrainingRun(tmp_path, checkpoint, *words, "--rollout-runs", "2", name="host")
        async with host.started():
            await host.until_step(2)
            address = await host.address_of("rollout")
            guest = TrainingRun(
                tmp_path, checkpoint, *words, "--rollout-address", address, "--use-fault-tolerance", name="guest"
            )
            async with guest.started():
                await guest.until_step(2)
                for _ in range(KILLS):
                    guest.kill("trainer")
                    last = guest.metrics()[-1]["step"], host.metrics()[-1]["step"]
                    await guest.until_step(last[0] + 2)
                    await host.until_step(last[1] + 2)
                async with TrainerClient(await host.address_of("trainer")) as trainer:
                    await trainer.pause()  # so that its weights stay
                beside = [await greedy(address) for _ in range(10)]
            async with RolloutClient(address, run="host") as rollout:
                while [run.name for run in (await rollout.get_fleet()).runs] != ["host"]:
                    await asyncio.sleep(0.2)
            tokens, log_probs = await greedy(address)
    for each in beside:
        assert each[0] == tokens
        assert each[1] == pytest.approx(log_probs, abs=1e-4), "a batch's other rows change the last bits"
    for run in (host, guest):
        assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0
        assert "lost, doubled, unaccounted: 0 0 0" in capsys.readouterr().out


def by_chance(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    """0 or 1, so that there is something to learn."""
    return score(zlib.crc32(item.item_id.encode()) % 2)(item)


async def greedy(address: str) -> tuple[list[int], list[float]]:
    """The likeliest tokens and their log-probs, as of the host's adapter."""
    request = pb.GenerateRequest(
        text="What is 3 + 4?",
        return_tokens=True,
        sampling=sample_pb2.SamplingParams(max_new_tokens=24, temperature=0.0),
    )
    tokens: list[int] = []
    log_probs: list[float] = []
    async with RolloutClient(address, run="host") as rollout:
        async for reply in rollout.generate(request):
            tokens += unpack_column(reply.tokens).tolist()
            log_probs += unpack_column(reply.log_probs).tolist()
    return tokens, log_probs
