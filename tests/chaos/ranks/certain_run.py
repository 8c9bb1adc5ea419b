"""A run of two data-parallel ranks beside a rollout service of certain samples, and its processes as they run now.

Samples follow from prompt and policy version, so two runs end with the same weights, bit for bit, however often the
processes of one of them die.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.process.linux import descendants
from tests.support.fakes.certain_rollout import CertainRollout, certain_rollout, produce
from tests.support.processes.training_run import ROOT, TrainingRun

GROUPS_PER_STEP = 4
MORTAL = {"PYTHONPATH": f"{ROOT / 'tests' / 'support' / 'faults' / 'mortal'}:{ROOT}"}
"""Processes die at lines of their logs (tests/support/faults/mortal)."""


@asynccontextmanager
async def certain_run(
    folder: Path, checkpoint: Path, *flags: str, num_steps: int, max_restarts: int, environment: Mapping[str, str]
) -> AsyncIterator[tuple[TrainingRun, CertainRollout]]:
    """A run that restarts its trainer, to be started as often as one likes; a checkpoint after every third step."""
    folder.mkdir()
    async with certain_rollout() as rollout:
        run = TrainingRun(
            folder, checkpoint,
            "--rollout-address", rollout.address, "--reward-address", "127.0.0.1:9",
            "--num-rollout", str(num_steps), "--save-interval", "3", "--lr", "1e-3",
            "--save-hf", str(folder / "export"), "--use-distributed-optimizer",
            "--update-weight-probe-tolerance", "1e6",  # the engine has no model to compare with
            "--peak-tflops", "0.1",
            "--use-fault-tolerance",
            *flags,
            environment=environment,
            constants=[f"headrace.launch.specs:MAX_TRAINER_RESTARTS={max_restarts}"],
        )  # fmt: skip
        yield run, rollout


@asynccontextmanager
async def producing(run: TrainingRun, supply: asyncio.Semaphore | None = None) -> AsyncIterator[None]:
    """Samples are made meanwhile; a buffer that starts again has its address again."""
    task = asyncio.create_task(produce(await run.address_of("buffer"), supply))
    try:
        yield
    finally:
        task.cancel()


async def the_starter(run: TrainingRun) -> int:
    """Waits for the process that starts the ranks, and for the ranks."""
    await run.address_of("trainer")
    while (pid := run.folder.services()["trainer"].pid) is None or len(ranks_of(pid)) < 2:
        assert run.is_running, run.last_words()
        await asyncio.sleep(0.05)
    return pid


def ranks_of(starter: int) -> dict[int, int]:
    """Process ids by rank."""
    return {int(rank): pid for pid in descendants(starter) if (rank := _environment(pid).get("RANK")) is not None}


def _environment(pid: int) -> dict[str, str]:
    """Of another process; empty when it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
