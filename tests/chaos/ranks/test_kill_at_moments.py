"""kill -9 when a step was consumed and when its checkpoint is not committed yet.

Rank 0 is held at the moment, and a process is killed there. The run goes on by itself; its steps and its weights are
the undisturbed run's, bit for bit, and the audit of its history finds nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.cli.main import main
from headrace.process.linux import runs
from tests.chaos.ranks.certain_run import certain_run, producing, ranks_of
from tests.long_forms import whole_run
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

KILLS = (
    ("ConsumeBatch.answered", "buffer"),  # consumed, and the trainer does not know
    ("CommitStep.leaves", "rank 0"),  # a whole checkpoint, and the ledger does not know
)
STEPS_PER_KILL = 4
"""One of them has a checkpoint."""
HELD = ROOT / "tests" / "support" / "faults" / "held"


@whole_run
@pytest.mark.ranks
@pytest.mark.timeout(1200)
async def test_a_kill_while_a_step_becomes_safe_changes_nothing_of_the_run(tmp_path: Path) -> None:
    num_steps = STEPS_PER_KILL * len(KILLS) + 2
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    orders = tmp_path / "orders"
    orders.mkdir()
    environment = {"PYTHONPATH": f"{HELD}:{ROOT}", "HELD_ORDERS": str(orders)}
    prepared = partial(
        certain_run,
        checkpoint=checkpoint,
        num_steps=num_steps,
        max_restarts=len(KILLS),
        environment=environment,
    )
    async with prepared(tmp_path / "calm") as (calm, _), calm.started(), producing(calm):
        await calm.finished()
    async with prepared(tmp_path / "killed") as (killed, _), killed.started(), producing(killed):
        for moment, victim in KILLS:
            await reached(killed, orders / moment)
            await kill(killed, victim, orders / f"{moment}.held")
        await killed.finished()
    assert killed.trained() == calm.trained()
    assert sorted(killed.trained()) == list(range(num_steps))
    weights, expected = (load_file(run.export / "model.safetensors") for run in (killed, calm))
    assert [name for name in expected if not weights[name].equal(expected[name])] == []
    assert await asyncio.to_thread(main, ["audit", str(killed.folder.path), "--deep"]) == 0


async def reached(run: TrainingRun, order: Path) -> None:
    """Waits until rank 0 is held there."""
    order.touch()
    while order.exists():
        assert run.is_running, run.last_words()
        await asyncio.sleep(0.005)  # another party's state


async def kill(run: TrainingRun, victim: str, held: Path) -> None:
    """Lets rank 0 go; returns when it is gone where it is the victim."""
    pids = {name: entry.pid for name, entry in run.folder.services().items() if entry.pid is not None}
    ranks = ranks_of(pids["trainer"])
    pids |= {f"rank {rank}": pid for rank, pid in ranks.items()}
    os.kill(pids[victim], signal.SIGKILL)
    held.unlink()
    while victim != "buffer" and runs(ranks[0]):  # the next moment is that of the next rank 0
        await asyncio.sleep(0.005)
