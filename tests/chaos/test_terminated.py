"""SIGTERM, with checkpoints written in the background: the run saves, commits and leaves; nothing is trained twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from services.trainer.checkpoint.checkpoint import whole_checkpoints
from tests.long_forms import whole_run
from tests.support.fakes.certain_rollout import certain_rollout, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun

pytestmark = [whole_run, pytest.mark.ranks, pytest.mark.timeout(1200)]

NUM_STEPS = 8


async def test_a_terminated_run_saves_commits_and_goes_on_without_a_step_lost(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    async with certain_rollout() as rollout:
        run = TrainingRun(
            tmp_path, checkpoint,
            "--rollout-address", rollout.address, "--reward-address", "127.0.0.1:9",
            "--num-rollout", str(NUM_STEPS), "--save-interval", "3", "--async-save", "--lr", "1e-3",
            "--save-hf", str(tmp_path / "export"), "--update-weight-probe-tolerance", "1e6",
        )  # fmt: skip
        async with producing(run, asyncio.Semaphore(6 * 4)):  # groups of six steps: it cannot end by itself
            await run.until_step(4)
        assert run.exit_code == 130, run.last_words()
        saved = whole_checkpoints(run.folder.path / "checkpoints")
        assert saved, run.last_words()
        assert not (tmp_path / "export").exists()
        step = saved[0][1].step
        assert step == len(lines(run)) >= 4, run.last_words()
        groups = [group.state for group in await run.groups()]
        assert groups.count(buffer_pb2.GROUP_STATE_COMMITTED) == 4 * step
        async with producing(run):
            await run.finished()
        assert run.exit_code == 0

    assert Counter(line["step"] for line in lines(run)) == dict.fromkeys(range(NUM_STEPS), 1)
    assert (tmp_path / "export" / "model.safetensors").is_file()


@asynccontextmanager
async def producing(run: TrainingRun, supply: asyncio.Semaphore | None = None) -> AsyncIterator[None]:
    """The run with somebody who makes its samples."""
    async with run.started():
        task = asyncio.create_task(produce(await run.address_of("buffer"), supply))
        try:
            yield
        finally:
            task.cancel()


def lines(run: TrainingRun) -> list[dict[str, int]]:
    """What the trainer wrote down of each step that it trained."""
    return [json.loads(line) for line in (run.folder.path / "trained.jsonl").read_text().splitlines()]
