"""The process between a launcher and a service is killed: the service does not live on beside its successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from headrace.launch.health import is_serving
from headrace.launch.supervisor import Supervisor
from headrace.process.linux import parent_of
from tests.unit.launch.test_supervisor import QUICK, Stage, alive, becomes, running


async def test_a_service_whose_guard_is_killed_ends_with_it_and_comes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    spec = stage.spec("--slow-to-end")
    supervisor = Supervisor([spec], None, stage.hear, QUICK, stage.pids.update, lambda: 0.0)
    async with running(supervisor):
        await becomes(lambda: any("ready" in line for line in stage.told))
        first = stage.pids["fake"]
        os.kill(parent_of(first), signal.SIGKILL)
        await becomes(lambda: sum("ready" in line for line in stage.told) == 2)
        assert not alive(first)
        assert await is_serving(spec.address)
    os.kill(stage.children()[0], signal.SIGKILL)  # what its service had started has no guard any more
    assert "fake ended with signal 9" in stage.told[1]
