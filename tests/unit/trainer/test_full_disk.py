"""A disk that is full: the trainer's own records wait or stay in memory, and nothing half-written is read as whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.errors import DiskFull
from services.trainer.data.buffer import TrainingRecord
from services.trainer.durable import retry_while_full
from services.trainer.plan.batch import Batch
from services.trainer.serving.report import RunReport, TensorBoard
from tests.support.faults.file_limit import files_end_at

BATCH = Batch((), b"digest")


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("left_bytes", [0, 10])
async def test_a_step_waits_for_the_disk_with_one_message_and_goes_on_when_there_is_space(
    tmp_path: Path, left_bytes: int
) -> None:
    record = TrainingRecord(tmp_path / "trained.jsonl")
    record.append(0, BATCH)
    size = record.path.stat().st_size
    with structlog.testing.capture_logs() as said:
        with files_end_at(size + left_bytes):
            waiting = asyncio.create_task(retry_while_full(lambda: record.append(1, BATCH), record.path))
            while not said:
                await asyncio.sleep(0.01)
            assert record.path.stat().st_size == size
            assert not waiting.done()
        await waiting
    assert steps(record.path) == [0, 1]
    assert [each["event"] for each in said] == ["disk_full", "disk_has_space"]
    assert f"the disk is full: {record.path}: " in said[0]["message"]
    assert "Delete other files on it, and the training goes on by itself" in said[0]["message"]


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
    assert steps_before_a_torn_line(file) == [1]
    report.write(4, {"loss": 4.0})
    assert steps(file) == [1, 2, 3, 4]
    report.close()


def test_a_start_on_a_full_disk_deletes_no_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    before = RunReport(tmp_path)
    before.resume(0)
    for step in (1, 2, 3):
        before.write(step, {})
    after = RunReport(tmp_path)
    with structlog.testing.capture_logs(), files_end_at(0):
        after.resume(2)
    assert steps(file) == [1, 2, 3]
    after.write(3, {"again": 1.0})
    assert steps(file) == [1, 2, 3]
    assert "again" in file.read_text()


def test_tensorboard_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    board.log(1, {"loss": 1.0})
    size = max(file.stat().st_size for file in (tmp_path / "tensorboard").iterdir())
    with files_end_at(size):
        board.log(2, {"loss": 2.0})
        board.log(3, {"loss": 3.0})
    board.log(4, {"loss": 4.0})
    board.log(5, {"loss": 5.0})
    board.close()
    found: list[Any] = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        events = EventAccumulator(str(file))
        events.Reload()
        found += [each.step for each in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []
    assert {1, 5} <= set(found)


def steps_before_a_torn_line(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
