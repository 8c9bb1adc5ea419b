"""The rows of a run in metrics.jsonl: what a start keeps of them, and what watchers are given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.trainer.serving import report as report_module
from services.trainer.serving.report import RunReport


async def test_rows_after_the_checkpoint_are_let_go_when_a_run_resumes(tmp_path: Path) -> None:
    report = RunReport(tmp_path)
    report.resume(0)
    for step in (1, 2, 3):
        report.write(step, {"reward/mean": 0.5})
    again = RunReport(tmp_path)
    again.resume(2)
    assert [row.step for row in again.rows()] == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


async def test_a_watcher_is_given_each_row_once_however_many_reads_of_the_file_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "_PART_BYTES", 200)
    before = RunReport(tmp_path)
    before.resume(0)
    for step in range(1, 41):
        before.write(step, {"reward/mean": 0.5})
    report = RunReport(tmp_path)
    told = list[int]()

    async def watch(from_step: int) -> None:
        async for row in report.watch(from_step):
            told.append(row.step)

    early = asyncio.create_task(watch(20))
    await asyncio.sleep(0)
    report.resume(30)  # a watcher that came first sees nothing of what is dropped
    for step in range(31, 35):
        report.write(step, {"again": 1.0})
        await asyncio.sleep(0)
    report.close()
    async with asyncio.timeout(60):
        await early
        await watch(0)
    assert told == [*range(20, 35), *range(1, 35)]
