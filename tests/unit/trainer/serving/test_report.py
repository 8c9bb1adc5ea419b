"""The trainer's own records: on a disk that is full, after a restart, and as watchers are given them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import structlog

from headrace.errors import DiskFull
from services.trainer.data.buffer import TrainingRecord
from services.trainer.durable import retry_while_full
from services.trainer.plan.batch import Batch
from services.trainer.serving.report import RunReport
from tests.support.faults.file_limit import files_end_at

BATCH = Batch((), b"digest")


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


async def test_a_step_waits_for_the_disk_with_one_message_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path / "trained.jsonl")
    record.append(0, BATCH)
    size = record.path.stat().st_size
    with structlog.testing.capture_logs() as said:
        with files_end_at(size + 10):
            waiting = asyncio.create_task(retry_while_full(lambda: record.append(1, BATCH), record.path))
            while not said:
                await asyncio.sleep(0.01)
            assert record.path.stat().st_size == size
            assert not waiting.done()
        await waiting
    assert steps(record.path) == [0, 1]
    assert [each["event"] for each in said] == ["disk_full", "disk_has_space"]
    assert f"the disk is full: {record.path}: " in said[0]["message"]


async def test_a_disk_that_stays_full_ends_the_trainer_with_the_file_and_the_way_out(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path / "trained.jsonl")
    with files_end_at(0), pytest.raises(DiskFull, match=r"trained\.jsonl: File too large.*move its folder"):
        await retry_while_full(lambda: record.append(0, BATCH), record.path, patience_seconds=0.0)
    assert record.path.read_bytes() == b""


def test_rows_of_metrics_stay_in_memory_on_a_full_disk_and_all_are_written_later(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    report = RunReport(tmp_path)
    report.resume(0)
    report.write(1, {"loss": 1.0})
    with structlog.testing.capture_logs() as said, files_end_at(file.stat().st_size + 10):
        report.write(2, {"loss": 2.0})
        report.write(3, {"loss": 3.0})
    assert [each["event"] for each in said] == ["metrics_not_written"]
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert [json.loads(line)["step"] for line in whole] == [1]
    report.write(4, {"loss": 4.0})
    assert steps(file) == [1, 2, 3, 4]
    report.close()


async def test_rows_after_the_checkpoint_are_let_go_when_a_run_resumes(tmp_path: Path) -> None:
    report = RunReport(tmp_path)
    report.resume(0)
    for step in (1, 2, 3):
        report.write(step, {"reward/mean": 0.5})
    again = RunReport(tmp_path)
    again.resume(2)
    assert [row.step for row in again.rows()] == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
