"""The launcher on a full disk: services start again all the same, and the run's folder is right when there is space."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.job.schema.job import Job
from headrace.launch.launcher import Launcher
from headrace.process.guarded import GuardedProcess
from tests.support.faults.file_limit import files_end_at


async def test_services_json_is_written_when_the_disk_has_space_and_a_person_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    job = Job.model_validate({"model": {"hf_checkpoint": "/none"}, "run": {"run_dir": tmp_path, "run_name": "r"}})
    launcher = Launcher(job, ["buffer"], told.append)
    launcher.folder.path.mkdir(parents=True)
    with files_end_at(0):
        launcher._write_services({"buffer": 1})
        launcher._write_services({"buffer": 2})
    file = launcher.folder.services_file
    assert not file.exists()
    async with asyncio.timeout(30):
        while not file.exists():
            await asyncio.sleep(0.01)
    assert launcher.folder.services()["buffer"].pid == 2
    assert told == [f"{file} cannot be written: the disk is full. Free some space there"]


async def test_a_process_starts_again_though_its_log_cannot_grow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("what the start before said\n")
    process = GuardedProcess([sys.executable, "-c", "raise SystemExit(7)"], log, {})
    with files_end_at(log.stat().st_size):
        await process.start()
        assert await process.wait() == 7
