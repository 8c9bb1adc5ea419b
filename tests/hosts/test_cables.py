"""A run over four hosts, with certificates and tokens, whose cables are pulled.

A cable is pulled at a call: before it leaves, when its answer is on its way and will be lost, or when that has come.
HEADRACE_HOSTS tries every phase and pair, for 30 s and for longer than a lease, and prints a table.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hosts.hosts import Network, network
from tests.support.hosts.run_on_hosts import RunOnHosts
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.with_constants import python_with

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(3600)]
long_form = pytest.mark.skipif("HEADRACE_HOSTS" not in os.environ, reason="long: make chaos sets HEADRACE_HOSTS")

CLEAN = "lost, doubled, unaccounted: 0 0 0"


@dataclass(frozen=True)
class Cell:
    """Where a cable is pulled."""

    phase: str
    caller: str
    other: str
    method: str
    moment: str = "leaves"
    """Or "answered"; at "lost" the call passes, and its answer does not."""

    @property
    def point(self) -> str:
        return f"{self.method}.{'leaves' if self.moment == 'lost' else self.moment}"


CELLS = (
    Cell("lease", "rollout", "buffer", "LeaseGroups"),
    Cell("lease", "rollout", "buffer", "LeaseGroups", "lost"),
    Cell("generation", "rollout", "buffer", "LeaseGroups", "answered"),
    Cell("generation", "trainer", "buffer", "LeaseGroups", "answered"),
    Cell("generation", "trainer", "rollout", "LeaseGroups", "answered"),
    Cell("score", "rollout", "reward", "Score"),
    Cell("score", "rollout", "reward", "Score", "lost"),
    Cell("put", "rollout", "buffer", "PutGroups"),
    Cell("put", "rollout", "buffer", "PutGroups", "lost"),
    Cell("broadcast", "trainer", "rollout", "BeginPublish"),
    Cell("broadcast", "trainer", "rollout", "PublishBucket"),
    Cell("broadcast", "trainer", "rollout", "CommitPublish", "lost"),
    Cell("commit", "trainer", "buffer", "ConsumeBatch", "lost"),
    Cell("commit", "trainer", "buffer", "CommitStep", "lost"),
)


@long_form
async def test_a_run_goes_on_after_a_cable_is_pulled_in_every_phase_for_less_and_for_more_than_a_lease(
    tmp_path: Path,
) -> None:
    with network() as hosts:
        lease = ("--buffer-python", python_with("services.buffer.build:LEASE_SECONDS=40.0"))
        model = make_tiny_qwen3(tmp_path / "model")
        run = RunOnHosts(hosts, tmp_path, model, "--num-rollout", "100000", "--save-interval", "1", *lease)
        async with run.started():
            await run.until_step(2)
            for cell in CELLS:
                took = [await pulled(hosts, run, cell, seconds) for seconds in (30.0, 50.0)]
                assert CLEAN in await run.audited()
                where = f"{cell.caller}–{cell.other}"
                print(f"| {cell.phase} | {where} | {cell.method} | {cell.moment} | {took[0]:.0f} s | {took[1]:.0f} s |")


async def pulled(hosts: Network, run: RunOnHosts, cell: Cell, seconds: float) -> float:
    """Seconds from the moment that the cable is back until a step is finished that began after it was pulled."""
    async with run.held(cell.point):
        if cell.moment == "lost":
            hosts.mute(cell.other, cell.caller)
        else:
            hosts.cut(cell.caller, cell.other)
        before = hosts.num_bytes(cell.caller, cell.other)
    if cell.moment == "lost":
        while hosts.num_bytes(cell.caller, cell.other) == before:
            await asyncio.sleep(0.001)
    await asyncio.sleep(seconds)  # what is tried is a time
    return await healed(hosts, run)


async def healed(hosts: Network, run: RunOnHosts) -> float:
    hosts.switch.heal()
    began, last = time.monotonic(), run.last_step()
    await run.until_step(last + 2)
    return time.monotonic() - began
