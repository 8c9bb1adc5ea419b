"""kill -9 of a rank at random points of a run and in every part of a start: the same weights, bit for bit.

Real launcher, buffer, Megatron ranks (two, data-parallel) and weight publication; only the samples are made without a
model, so that they follow from prompt and policy version. `make chaos` kills twenty times (HEADRACE_RANK_KILLS), and
either rank in every part of the start that follows; `make test` once, and one rank while it loads a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.cli.main import main
from tests.chaos.ranks.certain_run import GROUPS_PER_STEP, MORTAL, certain_run, producing, ranks_of, the_starter
from tests.support.fakes.certain_rollout import CertainRollout, allow
from tests.support.metric_docs import documented_metrics, undocumented
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.modes import closed
from tests.support.processes.training_run import TrainingRun

NUM_KILLS = int(os.environ.get("HEADRACE_RANK_KILLS", "1"))
SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "11"))
STEPS_PER_KILL = 4
NUM_STEPS = STEPS_PER_KILL * NUM_KILLS + 2
PARTS_OF_A_START = [(event, rank) for event in ("restoring", "joining", "ranks_met", "built") for rank in (1, 0)]
"""A rank says each of these before it does what is named: looks for the others, builds the model, loads, runs."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200 + 200 * NUM_KILLS)]


async def test_a_run_whose_ranks_are_killed_ends_with_the_undisturbed_runs_weights(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    chance = random.Random(SEED)
    aims = iter(PARTS_OF_A_START)
    num_kills = 0
    supply = asyncio.Semaphore(GROUPS_PER_STEP)  # one step ahead of the last kill: it cannot end before
    async with running(tmp_path / "calm", checkpoint) as (calm, _):
        await calm.finished()
    async with running(tmp_path / "killed", checkpoint, supply=supply) as (killed, rollout):
        for kill in range(NUM_KILLS):
            allow(supply, STEPS_PER_KILL * GROUPS_PER_STEP)
            starter = await the_starter(killed)
            in_a_start = kill % 4 == 3  # else in a step, a publication or a checkpoint
            if not in_a_start:
                await killed.until_serving("trainer")
                await killed.until_step(STEPS_PER_KILL * kill + chance.randint(1, STEPS_PER_KILL))
            await asyncio.sleep(chance.uniform(0.0, 10.0 if in_a_start else 0.5))
            if not in_a_start and (aim := next(aims, None)):
                order_of(killed).write_text("{} {}".format(*aim))  # for the next start: this one is over
                num_kills += 1
            kill_a_rank(starter, chance)
            num_kills += 1
            await until_restarts(killed, num_kills)
        allow(supply, NUM_STEPS * GROUPS_PER_STEP)
        await killed.finished()
        served = dict(rollout.engine.tensors)

    assert len(restarts(killed)) == num_kills, "\n".join(restarts(killed))
    assert not order_of(killed).exists()
    weights, expected = ((load_file(run.export / "model.safetensors")) for run in (killed, calm))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    assert all(weights[name].equal(served[name]) for name in weights)  # and they are what the engine got
    emitted = [set(row) - {"step", "time"} for row in calm.metrics()]
    assert not undocumented(set().union(*emitted))
    for row in emitted:
        assert {metric.name for metric in documented_metrics() if metric.always} <= row
    assert (calm.folder.path / "timeline.png").stat().st_size > 1000
    for run in (calm, killed):
        assert [*closed(run.folder.path), *closed(run.export)] == [], "others may read what the umask lets them"
    assert killed.trained() == calm.trained()
    assert sorted(killed.trained()) == list(range(NUM_STEPS))
    assert await asyncio.to_thread(main, ["audit", str(killed.folder.path)]) == 0


async def until_restarts(run: TrainingRun, number: int) -> None:
    """Waits until the trainer has ended so often."""
    while len(restarts(run)) < number:
        assert run.is_running, run.last_words()
        await asyncio.sleep(0.05)


def restarts(run: TrainingRun) -> list[str]:
    """What the launcher said of each."""
    return [line for line in run.log.read_text().splitlines() if "trainer ended with" in line]


def order_of(run: TrainingRun) -> Path:
    """The file that names a rank and the line of its log at which it dies (tests/support/faults/mortal)."""
    return run.log.with_name("order")


def kill_a_rank(starter: int, chance: random.Random) -> None:
    """`kill -9`."""
    ranks = ranks_of(starter)
    os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)


@asynccontextmanager
async def running(
    folder: Path, checkpoint: Path, *flags: str, supply: asyncio.Semaphore | None = None
) -> AsyncIterator[tuple[TrainingRun, CertainRollout]]:
    """Ends when the block is left; ranks die as the run's order says."""
    environment = MORTAL | {"MORTAL_ORDER": str(folder / "order")}
    prepared = certain_run(
        folder, checkpoint, *flags, num_steps=NUM_STEPS, max_restarts=2 * NUM_KILLS, environment=environment
    )
    async with prepared as (run, rollout), run.started(), producing(run, supply):
        yield run, rollout
