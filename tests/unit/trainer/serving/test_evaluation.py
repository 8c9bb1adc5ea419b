"""An evaluation that fails is a warning with its reason and a metric, never the end of training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import FailedPrecondition, Unavailable
from headrace.run_folder import RunFolder
from headrace.sample_log import SampleLog
from services.trainer.control.build import schedule_of
from services.trainer.loop import train
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import Evaluated, IntervalEvalScheduler, evaluations_of
from services.trainer.serving.report import RunReport
from services.trainer.serving.servicer import ExportFolders, TrainerServicer
from services.trainer.state import JobSchedule, TrainState
from tests.support.ledgers.answers import answered
from tests.unit.trainer.test_loop import Everything


class Rollout:
    """Its services answer an evaluation with what they were given, or raise it; `held` keeps them from ending."""

    def __init__(self, *answers: Exception | Sequence[rollout_pb2.EvalResult]) -> None:
        self._answers = list(answers)
        self.services = answers
        self.held = asyncio.Event()
        self.held.set()
        self.asked: list[int] = []

    async def watch_evaluation(
        self, evaluation_id: str, *args: object, **keywords: object
    ) -> AsyncIterator[rollout_pb2.EvaluateResponse]:
        self.asked.append(int(evaluation_id.split("-")[1]))
        sample = answered(f"{evaluation_id}/sums/0/0", "2 + 2 =", " 4", reward=1.0, group_id="eval/sums/0")
        yield rollout_pb2.EvaluateResponse(done=1, total=1, samples=[sample.pack()])
        await self.held.wait()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        yield rollout_pb2.EvaluateResponse(results=answer)


class Steps(Everything):
    """Ledger, ranks and schedule of fakes, with a real console."""

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        pass


RESULT = rollout_pb2.EvalResult(
    name="sums", mean_reward=0.5, num_samples=3, num_failed=1, min_policy_version=1, max_policy_version=2
)


@dataclass
class Run:
    """A trainer's loop of fakes over two steps, with the evaluations of a job."""

    folder: Path
    console: TrainerConsole
    report: RunReport
    steps: Steps

    async def train(self) -> None:
        await train(self.steps, self.steps, self.console, self.steps)
        self.console.finished()

    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def evaluated(self) -> list[tuple[int, float]]:
        return [(row["step"], row["eval_error"]) for row in self.rows() if "eval_error" in row]

    async def watched(self) -> list[trainer_pb2.WatchProgressResponse]:
        servicer = TrainerServicer(self.console, self.report, exports=ExportFolders(self.folder, []))
        return [row async for row in servicer.WatchProgress(trainer_pb2.WatchProgressRequest(), None)]


def run_of(folder: Path, load_with, rollout: Rollout, *flags: str, restored: int = 0) -> Run:
    data = folder / "eval.jsonl"
    data.write_text('{"prompt": "a", "label": "b"}\n')
    job = load_with("--eval-prompt-data", "sums", str(data), "--eval-interval", "1", "--num-rollout", "2", *flags)
    report, steps = RunReport(folder), Steps(num_steps=2, restored=restored)
    report.resume(restored)
    evaluations = evaluations_of(job, cast(RolloutClient, rollout), schedule_of(job), report, RunFolder(folder))
    console = TrainerConsole(report, evaluations, run="r", num_steps=2, groups_per_step=1)
    console.open(steps, 1)
    return Run(folder, console, report, steps)


async def test_a_failing_evaluation_is_a_warning_and_a_metric_and_the_run_goes_on(tmp_path: Path, load_with) -> None:
    error = FailedPrecondition("3 of 4\nfailed", reason="EVALUATION_FAILED")
    run = run_of(tmp_path, load_with, Rollout(error), "--eval-exact-version")
    await run.train()
    assert run.evaluated() == [(0, 1.0), (1, 1.0), (2, 1.0)]
    said = "the evaluation failed, EVALUATION_FAILED: 3 of 4 failed"
    assert {warning for row in run.rows() for warning in row.get("warnings", ())} == {said}
    told = [list(row.warnings) for row in await run.watched() if row.warnings]
    assert told == [[said]] * 3
    after = RunReport(tmp_path)
    after.resume(2)
    assert [list(row.warnings) for row in after.rows() if row.warnings] == [[said]] * 3


async def test_an_evaluation_whose_rollout_service_dies_is_begun_again_by_another_one(
    tmp_path: Path, load_with
) -> None:
    rollout = Rollout(Unavailable("it is gone"), [RESULT])
    run = run_of(tmp_path, load_with, rollout, "--eval-exact-version")
    await run.train()
    assert run.evaluated() == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert rollout.asked == [0, 0, 1, 2]
    (sample,) = SampleLog(RunFolder(tmp_path).samples).of_evaluation(0)  # those of the second one alone
    assert (sample.group_id, sample.response, sample.reward, sample.step) == ("eval/sums/0", " 4", 1.0, 0)


USERS_LOG = """
import json, pathlib

def log_eval(rollout_id, args, data, extra_metrics):
    seen = {n: [row["rewards"], row["truncated"], [s.response for s in row["samples"]]] for n, row in data.items()}
    pathlib.Path(__file__).with_suffix(f".{rollout_id}").write_text(json.dumps(seen))
    extra_metrics |= {"mine/best": max(data["sums"]["rewards"]), "mine/text": "no number"}
    if rollout_id == 2:
        raise OSError("the tracker is away")
    return True
"""


async def test_a_users_log_is_given_every_evaluated_sample(tmp_path: Path, load_with) -> None:
    (tmp_path / "mine.py").write_text(USERS_LOG)
    flags = ("--eval-exact-version", "--custom-eval-rollout-log-function-path", str(tmp_path / "mine.py"))
    run = run_of(tmp_path, load_with, Rollout([RESULT]), *flags)
    tracked: list[tuple[int, set[str]]] = []
    tracker = SimpleNamespace(
        log=lambda step, metrics: tracked.append((step, set(metrics))),
        log_rollouts=lambda step, samples: None,
        close=lambda: None,
    )
    run.report._trackers = tracker
    await run.train()
    assert json.loads((tmp_path / "mine.0").read_text()) == {"sums": [[1.0], [False], [" 4"]]}
    first, _, last = (row for row in run.rows() if "eval_error" in row)
    assert (first["eval/sums"], first["mine/best"], first["eval_failed/sums"]) == (0.5, 1.0, 1.0)
    assert first["warnings"] == ["1 of 4 samples of sums have no score and are left out of its mean"]
    assert "mine/text" not in first
    evaluated = [names for step, names in tracked if "eval_step" in names]
    assert evaluated[0] == {"mine/best", "eval_step"}, "the function has logged the rest itself"
    assert "eval/sums" in evaluated[-1]
    assert "mine.py:log_eval could not log the evaluation: OSError('the tracker is away')" in last["warnings"][1]
    assert last["eval/sums"] == 0.5


async def test_training_goes_on_beside_an_evaluation_whose_row_has_the_versions_that_answered(
    tmp_path: Path, load_with
) -> None:
    rollout = Rollout([RESULT])
    rollout.held.clear()
    run = run_of(tmp_path, load_with, rollout)
    training = asyncio.create_task(run.train())
    async with asyncio.timeout(60):
        while "export" not in run.steps.diary:
            await asyncio.sleep(0)
        assert [row["step"] for row in run.rows() if "policy_version" in row] == [1, 2], "all steps are trained"
        while run.console.status.phase != trainer_pb2.PHASE_EVALUATING:
            await asyncio.sleep(0)
        assert not training.done(), "the last evaluation is waited for"
        while not rollout.asked:
            await asyncio.sleep(0)
        assert run.console.status.evaluating_step == 0
        assert rollout.asked == [0]
        rollout.held.set()
        await training
    assert not run.console.status.HasField("evaluating_step")
    assert rollout.asked == [0, 2]
    left_out, first, last = (row for row in run.rows() if "eval_error" in row)
    assert (left_out["step"], left_out["eval_error"]) == (1, 1.0)
    assert "was left out for that of step 2" in left_out["warnings"][0]
    assert (first["step"], first["eval_step"], last["step"]) == (0, 0, 2)
    assert (first["eval_min_version/sums"], first["eval_max_version/sums"]) == (1, 2)


async def test_with_eval_exact_version_training_waits_for_each_evaluation(tmp_path: Path, load_with) -> None:
    rollout = Rollout([RESULT])
    rollout.held.clear()
    run = run_of(tmp_path, load_with, rollout, "--eval-exact-version")
    training = asyncio.create_task(run.train())
    async with asyncio.timeout(60):
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert rollout.asked
        assert not [line for line in run.steps.diary if line.startswith("train")]
        rollout.held.set()
        await training
    assert run.evaluated() == [(0, 0.0), (1, 0.0), (2, 0.0)]


async def test_an_evaluation_that_hangs_ends_at_rollout_timeout_seconds_and_its_row_says_so(
    tmp_path: Path, load_with
) -> None:
    rollout = Rollout([RESULT])
    rollout.held.clear()
    run = run_of(tmp_path, load_with, rollout, "--rollout-timeout-seconds", "0.05", "--eval-exact-version")
    async with asyncio.timeout(60):
        await run.train()
    assert run.evaluated() == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert "DEADLINE_EXCEEDED: it took longer than rollout_timeout_seconds 0.05" in run.rows()[0]["warnings"][0]


async def test_a_stop_cuts_the_evaluation_off_and_a_resumed_run_evaluates_again(tmp_path: Path, load_with) -> None:
    rollout = Rollout([RESULT])
    rollout.held.clear()
    run = run_of(tmp_path, load_with, rollout)
    training = asyncio.create_task(run.train())
    async with asyncio.timeout(60):
        while not rollout.asked:
            await asyncio.sleep(0)
        run.console.leave()
        await training
    assert (0, 1.0) in run.evaluated()
    assert not [error for _, error in run.evaluated() if error == 0.0]
    cut_off = next(row for row in run.rows() if row["step"] == 0)
    assert cut_off["warnings"] == ["the evaluation of step 0 was cut off: the run was stopped"]
    rollout.held.set()
    again = run_of(tmp_path, load_with, rollout)
    await again.train()
    assert (0, 0.0) in again.evaluated()


async def test_what_a_kill_cut_off_is_said_and_the_resumed_step_is_evaluated_in_its_place(
    tmp_path: Path, load_with
) -> None:
    before = RunReport(tmp_path)
    before.write(0, {"eval_error": 0.0, "eval/sums": 0.5})
    before.write(2, {"reward/mean": 0.5})  # the evaluation of step 1 has no row: a kill cut it off
    rollout = Rollout([RESULT])
    run = run_of(tmp_path, load_with, rollout, "--eval-interval", "3", "--num-rollout", "8", restored=4)
    run.steps.num_steps = 4
    await run.train()
    assert rollout.asked == [4]
    lost, instead = (row for row in run.rows() if row["step"] > 2)
    assert (lost["step"], lost["eval_error"], instead["step"], instead["eval_error"]) == (3, 1.0, 4, 0.0)
    assert lost["warnings"] == [
        "the evaluation of step 3 has no result, as the trainer ended before it: step 4 is evaluated in its place"
    ]


async def test_a_resumed_run_does_not_repeat_an_evaluation_that_has_its_result(tmp_path: Path, load_with) -> None:
    before = RunReport(tmp_path)
    before.write(1, {"eval_error": 0.0, "eval/sums": 0.5})
    rollout = Rollout([RESULT])
    run = run_of(tmp_path, load_with, rollout, "--num-rollout", "3", restored=1)
    await run.train()
    assert rollout.asked == [2]


class Asked:
    """An evaluation that ends when it is let; it notes what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Sequence[str]]] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, state: TrainState, names: Sequence[str]) -> Evaluated:
        self.calls.append((state.step, tuple(names)))
        await self.go.acquire()
        return Evaluated({"eval_error": 0.0} | {f"eval/{name}": 1.0 for name in names})


def scheduler_of(folder: Path, asked: Asked, **intervals: int) -> IntervalEvalScheduler:
    schedule = JobSchedule(100, publish_every=1, save_every=None, eval_every=intervals, evaluates_first=False)
    return IntervalEvalScheduler(asked, schedule, RunReport(folder), exact=False)


async def reach(scheduler: IntervalEvalScheduler, *steps: int) -> None:
    for step in steps:
        await scheduler.at(TrainState(step, step, 1))
        await asyncio.sleep(0)


async def test_an_evaluation_takes_over_the_data_sets_of_the_one_that_it_displaces(tmp_path: Path) -> None:
    asked = Asked()
    scheduler = scheduler_of(tmp_path, asked, often=1, seldom=2)
    await reach(scheduler, 0, 1, 2, 3)
    assert asked.calls == [(1, ("often",))]
    asked.go.release()
    asked.go.release()
    async with asyncio.timeout(60):
        await scheduler.finish()
    assert asked.calls[1:] == [(3, ("often", "seldom"))]


async def test_nothing_is_evaluated_after_a_stop(tmp_path: Path) -> None:
    asked = Asked()
    scheduler = scheduler_of(tmp_path, asked, often=1)
    await reach(scheduler, 0)
    scheduler.stop("the run was stopped")
    await reach(scheduler, 1)
    assert asked.calls == []


async def test_a_row_that_cannot_be_written_ends_the_run_at_the_next_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    scheduler = scheduler_of(tmp_path, asked, often=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scheduler._report, "write", full)
    await reach(scheduler, 0, 1)
    asked.go.release()
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(OSError, match="No space left"):
        await reach(scheduler, 2)
