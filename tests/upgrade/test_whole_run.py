"""A run of the release continues today.

Real launcher, buffer, Megatron rank and weight publication; only the samples are made without a model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli.main import main
from services.trainer.checkpoint.manifest import Manifest
from tests.support.fakes.certain_rollout import allow, certain_rollout, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun
from tests.upgrade.release import RELEASES, Release, extracted

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("HEADRACE_UPGRADE" not in os.environ, reason="long: make chaos sets HEADRACE_UPGRADE"),
]

GROUPS_PER_STEP = 4
NUM_STEPS = 6
STEPS_EACH = 2


@pytest.fixture(scope="module", params=RELEASES, ids=lambda entry: str(entry["name"]))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return extracted(request.param, tmp_path_factory.mktemp("release"))


def training_run(folder: Path, code: Path, rollout_address: str, *flags: str) -> TrainingRun:
    """The same command line for both releases."""
    return TrainingRun(
        folder, folder.parent / "model",
        "--rollout-address", rollout_address, "--reward-address", "127.0.0.1:9",
        "--num-rollout", str(NUM_STEPS), "--save-interval", "1", "--lr", "1e-3", "--actor-num-gpus-per-node", "1",
        "--update-weight-probe-tolerance", "1e6", *flags,
        code=code,
    )  # fmt: skip


@asynccontextmanager
async def going(run: TrainingRun, supply: asyncio.Semaphore, *, address: str | None = None) -> AsyncIterator[None]:
    """The run, and the producer of its samples."""
    run.folder.services_file.unlink(missing_ok=True)  # an earlier start's addresses
    async with run.started():
        producing = asyncio.create_task(produce(address or await run.address_of("buffer"), supply))
        try:
            yield
        finally:
            producing.cancel()


async def test_a_run_of_the_release_goes_on_today(release: Release, tmp_path: Path) -> None:
    """Its ledger, checkpoint, job.json and trainer's record: steps 1 and 2 there, 3 to 6 here, with a restart."""
    make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "run").mkdir()
    supply = asyncio.Semaphore(0)
    for start, code in enumerate((release.code, ROOT, ROOT)):
        step = STEPS_EACH * (start + 1)
        async with certain_rollout() as rollout:
            run = training_run(tmp_path / "run", code, rollout.address)
            async with going(run, supply):
                allow(supply, STEPS_EACH * GROUPS_PER_STEP)
                await run.until_step(step)
                if step == NUM_STEPS:
                    await run.finished()
        said = run.log.read_text()
        assert start == 0 or f"resuming after step {STEPS_EACH * start}" in said, said
        newest = max((run.folder.path / "checkpoints").glob("step-*"))
        assert Manifest.read(newest).step == step
        assert await asyncio.to_thread(main, ["audit", str(run.folder.path), "--deep"]) == 0
    assert [row["step"] for row in run.metrics()] == list(range(1, NUM_STEPS + 1))
    assert sorted(run.trained()) == list(range(NUM_STEPS))
