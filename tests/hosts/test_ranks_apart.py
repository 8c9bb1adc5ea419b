"""The cable between two hosts with trainer ranks on each is pulled, where the trainer may start again by itself."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.support.hosts.hosts import NAMES, network
from tests.support.hosts.run_on_hosts import RunOnHosts
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("HEADRACE_HOSTS" not in os.environ, reason="long: make chaos sets HEADRACE_HOSTS"),
]
CLEAN = "lost, doubled, unaccounted: 0 0 0"


async def test_two_ranks_on_each_of_two_hosts_resume_after_the_cable_between_them_was_pulled(tmp_path: Path) -> None:
    """For as long as a heartbeat may be late, and for so long that ranks look for each other meanwhile."""
    with network((*NAMES, "second")) as hosts:
        run = RunOnHosts(
            hosts,
            tmp_path,
            make_tiny_qwen3(tmp_path / "model"),
            "--num-rollout",
            "100000",
            "--save-interval",
            "1",
            *("--tensor-model-parallel-size", "2", "--use-fault-tolerance"),
            trainers=("trainer", "second"),
            ranks_per_host=2,
        )
        async with run.started():
            await run.until_step(2)
            for seconds in (30.0, 60.0):
                hosts.cut("trainer", "second")
                await asyncio.sleep(seconds)  # what is tried is a time
                hosts.switch.heal()
                began, last = time.monotonic(), run.last_step()
                await run.until_step(last + 2)
                print(f"| {seconds:.0f} s | {time.monotonic() - began:.0f} s |", flush=True)
                assert CLEAN in await run.audited()
