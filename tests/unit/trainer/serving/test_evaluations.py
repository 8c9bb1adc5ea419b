"""Evaluations one at a time: which data sets run, which wait, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.job.eval_sets import EvalSet
from headrace.job.schema.production import EvalSection
from services.trainer.serving.evaluation import Evaluated, IntervalEvalScheduler
from services.trainer.serving.report import RunReport
from services.trainer.state import JobSchedule, TrainState


class Asked:
    """An evaluation that ends when it is let; it notes what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Sequence[str]]] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, state: TrainState, names: Sequence[str]) -> Evaluated:
        self.calls.append((state.step, tuple(names)))
        await self.go.acquire()
        return Evaluated({"eval_error": 0.0} | {f"eval/{name}": 1.0 for name in names})


def evaluations_of(folder: Path, asked: Asked, **intervals: int) -> IntervalEvalScheduler:
    sets = [EvalSet(name=name, path=Path("x"), interval=every) for name, every in intervals.items()]
    section = EvalSection(skip_eval_before_train=True)
    schedule = JobSchedule(100, publish_every=1, save_every=None, evaluation=section, eval_sets=sets)
    return IntervalEvalScheduler(asked, schedule, RunReport(folder), exact=False)


async def reach(evaluations: IntervalEvalScheduler, *steps: int) -> None:
    for step in steps:
        await evaluations.at(TrainState(step, step, 1))
        await asyncio.sleep(0)


async def test_an_evaluation_takes_over_the_data_sets_of_the_one_that_it_displaces(tmp_path: Path) -> None:
    asked = Asked()
    evaluations = evaluations_of(tmp_path, asked, often=1, seldom=2)
    await reach(evaluations, 0, 1, 2, 3)
    assert asked.calls == [(1, ("often",))]
    asked.go.release()
    asked.go.release()
    async with asyncio.timeout(60):
        await evaluations.finish()
    assert asked.calls[1:] == [(3, ("often", "seldom"))]


async def test_nothing_is_evaluated_after_a_stop(tmp_path: Path) -> None:
    asked = Asked()
    evaluations = evaluations_of(tmp_path, asked, often=1)
    await reach(evaluations, 0)
    evaluations.stop("the run was stopped")
    await reach(evaluations, 1)
    assert asked.calls == []


async def test_a_row_that_cannot_be_written_ends_the_run_at_the_next_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    evaluations = evaluations_of(tmp_path, asked, often=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluations._report, "write", full)
    await reach(evaluations, 0, 1)
    asked.go.release()
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(OSError, match="No space left"):
        await reach(evaluations, 2)


async def test_after_a_kill_both_the_one_that_ran_and_the_one_that_waited_are_told(tmp_path: Path) -> None:
    asked = Asked()
    before = evaluations_of(tmp_path, asked, often=2)
    await reach(before, *range(9))  # that of step 2 runs, those of 4 and 6 were left out, that of 8 waits
    report = RunReport(tmp_path)
    report.resume(9)
    asked.calls.clear()
    after = evaluations_of(tmp_path, asked, often=2)
    after._report = report
    await reach(after, 9)
    assert asked.calls == [(9, ("often",))]
    told = {row.step: row.warnings[0] for row in report.rows()}
    assert sorted(told) == [2, 4, 6, 8]
    assert "has no result, as the trainer ended before it: step 9 is evaluated in its place" in told[2]
    assert "was left out" in told[4]
    assert "has no result" in told[8]
    before.stop("the test ends")
