"""Images that `make images` has built: a quickstart in one container, a run in four (long: HEADRACE_IMAGES)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.support.containers.engine import Engine
from tests.support.containers.stack import Stack
from tests.support.deployments import SERVICES

pytestmark = pytest.mark.timeout(7200)

STEP_SECONDS = 900.0
QUICKSTART_SECONDS = 3600.0
FOLDER = "/var/lib/headrace/sums"
SMALL = {
    "HEADRACE_ROLLOUT_BATCH_SIZE": "4",
    "HEADRACE_N_SAMPLES_PER_PROMPT": "4",
    "HEADRACE_OVER_SAMPLING_BATCH_SIZE": "6",
    "HEADRACE_MICRO_BATCH_SIZE": "16",
    "HEADRACE_SAVE_INTERVAL": "2",
    "HEADRACE_KEEP_LAST": "1",
}
"""The job of `headrace init`, with a quarter of its samples, and checkpoints."""


LONG = pytest.mark.skipif("HEADRACE_IMAGES" not in os.environ, reason="long: make images sets HEADRACE_IMAGES")


@LONG
async def test_one_container_runs_the_quickstart() -> None:
    engine = Engine()
    words = ("headrace", "quickstart", "--num-rollout", "2")
    said = await engine.said("run", *engine.run_flags, "--rm", "headrace", *words, seconds=QUICKSTART_SECONDS)
    print(said)
    assert "curves.png" in said


@LONG
async def test_four_containers_train_outlive_each_others_deaths_drain_and_resume(tmp_path: Path) -> None:
    async with Stack(Engine(), tmp_path, {**SMALL, "HEADRACE_NUM_ROLLOUT": "1000"}).open() as stack:
        await stack.write_job()
        await stack.certificates()
        for service in SERVICES:
            await stack.start(service)
            print(f"{service}: healthy after {await stack.until_healthy(service):.0f} s")
        await until_step(stack, 2)

        group = (
            await stack.outside(
                "submit", "--buffer-address", "buffer:7001", "--prompt", "3 + 4 =", "--label", "7", "--ids"
            )
        ).strip()
        assert group.startswith("train/")
        samples = (await stack.inside("trainer", "headrace", "samples", FOLDER, "-n", "3", "--json")).splitlines()
        assert len(samples) == 3
        status = await stack.inside("trainer", "headrace", "status", FOLDER)
        assert all(service in status for service in SERVICES), status
        assert "sums" in await stack.inside("trainer", "headrace", "eval", FOLDER, "--history")

        for service in SERVICES:
            before = await last_step(stack)
            await stack.kill(service)
            await stack.again(service)
            healthy = await stack.until_healthy(service)
            await until_step(stack, before + 2)
            print(f"{service}: killed, healthy again after {healthy:.0f} s; step {await last_step(stack)}")
        assert "0 0 0" in await stack.inside("trainer", "headrace", "audit", FOLDER, "--deep")

        last = await last_step(stack)
        for service in ("trainer", "rollout", "reward", "buffer"):
            code, seconds = await stack.stop(service)
            print(f"{service}: exit code {code} {seconds:.1f} s after SIGTERM")
            assert code == 0, await stack.last_words()

        for service in ("buffer", "reward", "rollout"):
            await stack.again(service)
            await stack.until_healthy(service)
        await stack.remove("trainer")
        await stack.start("trainer", HEADRACE_NUM_ROLLOUT=str(last + 2))
        assert await stack.ended("trainer") == 0, await stack.last_words()
        said = await stack.in_volume_of("trainer", "audit", FOLDER, "--deep")
        assert "lost, doubled, unaccounted: 0 0 0" in said
        print(said)
        for service in ("rollout", "reward", "buffer"):
            assert (await stack.stop(service))[0] == 0, await stack.last_words()


async def until_step(stack: Stack, step: int) -> None:
    """Waits until the trainer has reported it. Raises AssertionError when it takes longer than any step may."""
    async with asyncio.timeout(STEP_SECONDS):
        while await last_step(stack) < step:
            await asyncio.sleep(1)


async def last_step(stack: Stack) -> int:
    """0 before the first, and while the trainer's container is away."""
    try:
        rows = await stack.inside("trainer", "cat", f"{FOLDER}/metrics.jsonl")
    except AssertionError:
        return 0
    return max((json.loads(row)["step"] for row in rows.rpartition("\n")[0].splitlines()), default=0)
