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
from headrace.job.schema.job import Job
from headrace.launch.launcher import orphans, wait_for_orphans
from headrace.launch.previous_run import has_ended, is_finished, previous_run, resumption
from headrace.launch.ranks.local import new_rendezvous
from headrace.process.linux import runs
from headrace.run_folder import RunFolder, ServiceEntry

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


def test_what_a_killed_launcher_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    left = new_rendezvous(tmp_path)
    left.write_text("127.0.0.1 1 token")
    left.with_name(f"{left.name}.part").write_text("127.0.0.1")
    log = tmp_path / "trainer-rank-1.log"
    log.touch()
    assert new_rendezvous(tmp_path) != left
    assert list(tmp_path.iterdir()) == [log]


def started(load_with, folder: Path, *flags: str, step: int = 0) -> tuple[RunFolder, Job]:
    job = load_with("--run-dir", str(folder), "--num-rollout", "9", *flags)
    run = RunFolder(folder / job.run.run_name)
    run.create(job)
    (run.ledger / "state.sqlite").touch()
    for each in (1, step):
        (run.path / "checkpoints" / f"step-{each:08}").mkdir(parents=True, exist_ok=True)
    (run.path / "checkpoints" / ".draft-2").mkdir()
    return run, job


def test_a_start_says_where_it_goes_on_and_what_changed(load_with, tmp_path: Path) -> None:
    run, _ = started(load_with, tmp_path, "--lr", "5e-6", step=6)
    earlier = previous_run(run)
    assert earlier is not None
    again = load_with(
        "--run-dir", str(tmp_path), "--num-rollout", "12", "--lr", "1e-5", "--buffer-address", "127.0.0.1:1"
    )
    assert resumption(earlier, again) == "resuming after step 6; num_rollout 9 -> 12; lr 5e-6 -> 1e-5"


def test_a_run_without_a_ledger_may_change_everything(load_with, tmp_path: Path) -> None:
    run, _ = started(load_with, tmp_path)
    (run.ledger / "state.sqlite").unlink()
    earlier = previous_run(run)
    assert earlier is not None
    assert "rollout_seed 42 -> 7" in resumption(earlier, load_with("--rollout-seed", "7"))


def test_a_run_is_finished_when_its_last_step_is_saved_and_its_export_is_there(load_with, tmp_path: Path) -> None:
    run, job = started(load_with, tmp_path, step=9)
    assert is_finished(run, job)
    assert not is_finished(run, load_with("--num-rollout", "10"))
    assert not is_finished(run, load_with("--num-rollout", "9", "--save-hf", str(tmp_path / "absent")))


def test_a_run_has_ended_when_nothing_that_it_started_lives(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_services({"buffer": ServiceEntry("h:1", None, None)})
    assert not has_ended(run)
    run.write_services({"buffer": ServiceEntry("h:1", None, None), "trainer": ServiceEntry("h:2", None, 2**22 + 1)})
    assert has_ended(run)
