"""An engine whose ranks are on two machines, with SGLang: as two processes, and on two hosts with an address each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.rollout.fleet_build import sglang_factory
from tests.long_forms import whole_run
from tests.support.engines.two_machines import job_of, story
from tests.support.hosts.hosts import network

pytestmark = [pytest.mark.engine]


@whole_run
async def test_an_engine_of_two_processes_is_published_to_and_comes_back_when_one_is_killed(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    await story(job, sglang_factory(job, tmp_path, has_accelerator=False))


@whole_run
async def test_an_engine_of_two_hosts_is_published_to_and_comes_back_when_one_is_killed(tmp_path: Path) -> None:
    with network(("here", "there")) as net:
        here, there = net.hosts["here"], net.hosts["there"]
        words = ("tests.support.engines.two_machines", str(tmp_path), there.namespace, here.address, there.address)
        await here.said(sys.executable, "-m", *words)
