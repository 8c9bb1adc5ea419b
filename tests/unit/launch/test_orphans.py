"""A start waits for what a launcher that was killed has left of the same services, and for nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import FailedPrecondition
from headrace.launch.launcher import orphans, wait_for_orphans
from headrace.process.linux import runs
from headrace.run_folder import RunFolder

_LAUNCHER = """
import asyncio, sys, threading, time
from pathlib import Path
from headrace.process.child import Child
async def main():
    for _ in range(20):  # the kernel tells a child of the end of its parent's threads one by one
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    await Child(sys.argv[2:], Path(sys.argv[1]), {}, orphan_seconds=60.0).start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
_SERVICE = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("ready").touch()
while not Path("may-end").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "r")


@pytest.fixture
def launcher(tmp_path: Path, run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """Of a buffer that takes its time to end; it names the job as `headrace train` does: from its own folder."""
    job = str(run.job_file.relative_to(tmp_path))
    service = [sys.executable, "-c", _SERVICE, "services.buffer", "--config", job]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path / "log"), *service]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)  # another party's state
        yield process
        process.kill()
        (tmp_path / "may-end").touch()
        wait_for_orphans(run, ["buffer"], print)


def test_a_start_waits_until_the_services_of_a_killed_launcher_have_ended(
    tmp_path: Path, run: RunFolder, launcher: subprocess.Popen[str]
) -> None:
    assert orphans(run, ["buffer"]) == [], "a launcher that lives has left nothing"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    (guard,) = orphans(run, ["buffer", "trainer"])
    assert orphans(run, ["trainer"]) == orphans(RunFolder(run.path.with_name("other")), ["buffer"]) == []
    told: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        threading.Timer(0.2, (tmp_path / "may-end").touch).start()

    wait_for_orphans(run, ["buffer"], hear)
    assert orphans(run, ["buffer"]) == []
    assert not runs(guard)
    assert told == [f"{run.path}: waiting for the end of what an earlier start has left, processes {guard}"]


def test_what_does_not_end_is_named_with_the_way_out(run: RunFolder, launcher: subprocess.Popen[str]) -> None:
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    with pytest.raises(FailedPrecondition, match=r"processes of an earlier start of run .* do not end: kill -9 \d+"):
        wait_for_orphans(run, ["buffer"], print, patience_seconds=0.0)
