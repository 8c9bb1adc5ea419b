"""kill -9 of buffer, trainer and each rank while a step is consumed or committed or a checkpoint is written.

The promise: the run goes on by itself, every step is trained on the calm run's samples, once in what counts in the end,
the weights are the calm run's bit for bit, and the audit of the whole history finds nothing. `make chaos` runs it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from tests.chaos.test_rank_kill import GROUPS_PER_STEP, ranks_of, running, the_starter
from tests.support.fakes.certain_rollout import allow
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun

MOMENTS = ("consumed", "committed", "checkpoint")
VICTIMS = ("buffer", "trainer", "rank 0", "rank 1")
STEPS_PER_KILL = 4
"""One of them has a checkpoint, which is taken after every third step."""


@pytest.mark.skipif("kill" not in os.environ.get("HEADRACE_SURVIVAL", ""), reason="long: make chaos runs it")
@pytest.mark.ranks
@pytest.mark.timeout(7200)
async def test_whoever_dies_while_a_step_becomes_safe_changes_nothing_of_the_run(tmp_path: Path) -> None:
    kills = list(product(MOMENTS, VICTIMS))
    num_steps = STEPS_PER_KILL * len(kills) + 2
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    async with running(tmp_path / "calm", checkpoint, num_steps=num_steps) as (calm, _):
        await calm.finished()
    supply = asyncio.Semaphore(0)
    async with running(
        tmp_path / "killed", checkpoint, supply=supply, num_steps=num_steps, max_restarts=len(kills)
    ) as (killed, _):
        for number, (moment, victim) in enumerate(kills):
            starter = await the_starter(killed)
            await killed.until_serving("trainer")
            await at_the_moment(killed, moment, supply)
            os.kill(pid_of(killed, victim, starter), signal.SIGKILL)
            print(f"{moment}: {victim} is killed", flush=True)
            await killed.until_step(STEPS_PER_KILL * (number + 1))
        allow(supply, num_steps * GROUPS_PER_STEP)
        await killed.finished()
    assert killed.trained() == calm.trained()
    assert sorted(killed.trained()) == list(range(num_steps))
    weights, expected = (load_file(run.export / "model.safetensors") for run in (killed, calm))
    assert [name for name in expected if not weights[name].equal(expected[name])] == []
    assert await asyncio.to_thread(main, ["audit", str(killed.folder.path), "--deep"]) == 0


async def at_the_moment(run: TrainingRun, moment: str, supply: asyncio.Semaphore) -> None:
    """Lets the run make some more steps, and returns within milliseconds of the first such moment."""
    async with asyncio.timeout(300), BufferClient(await run.address_of("buffer")) as client:
        position = await client.position()
        allow(supply, STEPS_PER_KILL * GROUPS_PER_STEP)
        if moment == "checkpoint":
            while not any((run.folder.path / "checkpoints").glob(".draft-*")):
                await asyncio.sleep(0.001)  # another party's state
            return
        async with aclosing(client.watch("train", position + 1)) as events:
            async for event in events:
                if event.kind == moment:
                    return


def pid_of(run: TrainingRun, victim: str, starter: int) -> int:
    if victim.startswith("rank"):
        return ranks_of(starter)[int(victim.split()[1])]
    pid = run.folder.services()[victim].pid
    assert pid is not None
    return pid
