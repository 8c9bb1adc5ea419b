"""services.json, which every launcher of a run's folder writes: none loses what another has written."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from headrace.job.schema.job import Job
from headrace.launch.buffer_of_run import living_buffer
from headrace.launch.launcher import Launcher
from headrace.launch.previous_run import has_ended
from tests.support.faults.file_limit import files_end_at


def launcher_of(folder: Path, service: str) -> Launcher:
    job = {"model": {"hf_checkpoint": "/none"}, "run": {"run_dir": folder, "run_name": "r"}}
    launcher = Launcher(Job.model_validate(job), [service], print)
    launcher.folder.path.mkdir(exist_ok=True)
    return launcher


@pytest.mark.parametrize("content", ["", "[]", '{"buffer": {"pid": 1}}'])
def test_a_start_writes_a_damaged_one_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "services.json").write_text(content)
    launcher = launcher_of(tmp_path, "buffer")
    launcher._write_services({"buffer": os.getpid()})
    assert list(launcher.folder.running_services()) == ["buffer"]


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
    async with asyncio.timeout(60):
        while not file.exists():
            await asyncio.sleep(0.01)
    assert launcher.folder.services()["buffer"].pid == 2
    assert told == [f"{file} cannot be written: the disk is full. Free some space there"]


def test_a_process_that_has_the_number_of_a_service_that_ended_is_not_it(tmp_path: Path) -> None:
    """As after a restart of the machine, and of a container, whose numbers are few."""
    launcher = launcher_of(tmp_path, "buffer")
    launcher._write_services({"buffer": os.getpid()})
    processes = launcher.folder.path / ".processes.json"
    boot, began = json.loads(processes.read_text())[str(os.getpid())].split()
    for other in (f"{boot} 1", f"another-boot {began}"):
        processes.write_text(json.dumps({str(os.getpid()): other}))
        assert launcher.folder.running_services() == {}
        assert has_ended(launcher.folder)
        assert living_buffer(launcher.folder) is None
    for unknown in ("{}", "[]", "{", ""):  # an earlier release does not write it
        processes.write_text(unknown)
        assert list(launcher.folder.running_services()) == ["buffer"]
    processes.unlink()
    assert list(launcher.folder.running_services()) == ["buffer"]
