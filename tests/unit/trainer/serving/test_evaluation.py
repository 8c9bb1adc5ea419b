"""An evaluation that fails is a warning with its reason and a metric, never the end of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import FailedPrecondition, Unavailable
from services.trainer.control.build import evaluator_of, schedule_of
from services.trainer.loop import train
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.export_folder import ExportFolders
from services.trainer.serving.report import RunReport
from services.trainer.serving.servicer import TrainerServicer
from services.trainer.state import TrainState
from tests.unit.trainer.test_loop import Everything


class Rollout:
    """Answers an evaluation with what it was given, or raises it."""

    def __init__(self, answer: Exception | Sequence[rollout_pb2.EvalResult]) -> None:
        self._answer = answer

    async def evaluate(self, *args: object, **keywords: object) -> Sequence[rollout_pb2.EvalResult]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Steps(Everything):
    """Ledger, ranks and schedule of fakes, with a real console."""

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        pass


async def rows_of_a_run(folder: Path, load_with, answer) -> tuple[list[dict], list[trainer_pb2.WatchProgressResponse]]:
    data = folder / "eval.jsonl"
    data.write_text('{"prompt": "a", "label": "b"}\n')
    job = load_with("--eval-prompt-data", "sums", str(data), "--eval-interval", "1", "--num-rollout", "2")
    report, steps = RunReport(folder), Steps(num_steps=2)
    evaluator = evaluator_of(job, cast(RolloutClient, Rollout(answer)), schedule_of(job))
    console = TrainerConsole(report, evaluator, run="r", num_steps=2, groups_per_step=1)
    console.open(steps, 1)
    assert (await train(steps, steps, console, steps)).step == 2
    console.finished()
    servicer = TrainerServicer(console, report, exports=ExportFolders(folder, []))
    watched = [row async for row in servicer.WatchProgress(trainer_pb2.WatchProgressRequest(), None)]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], watched


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FailedPrecondition("3 of 4 failed", reason="EVALUATION_FAILED"), "EVALUATION_FAILED: 3 of 4 failed"),
        (Unavailable("nobody is there"), "UNAVAILABLE: nobody is there"),
        (ValueError("a bug\nof the client"), "ValueError: a bug of the client"),
    ],
)
async def test_a_failing_evaluation_is_a_warning_and_a_metric_and_the_run_goes_on(
    tmp_path: Path, load_with, error: Exception, said: str
) -> None:
    rows, watched = await rows_of_a_run(tmp_path, load_with, error)
    evaluated = [row for row in rows if "eval_error" in row]
    assert [(row["step"], row["eval_error"]) for row in evaluated] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert {warning for row in evaluated for warning in row["warnings"]} == {f"the evaluation failed, {said}"}
    assert [list(row.warnings) for row in watched if row.warnings] == [[f"the evaluation failed, {said}"]] * 3


async def test_an_evaluation_of_which_samples_have_no_score_says_how_many(tmp_path: Path, load_with) -> None:
    result = rollout_pb2.EvalResult(name="sums", mean_reward=0.5, num_samples=3, num_failed=1)
    rows, _ = await rows_of_a_run(tmp_path, load_with, [result])
    first = next(row for row in rows if "eval_error" in row)
    assert (first["eval_error"], first["eval/sums"], first["eval_failed/sums"]) == (0.0, 0.5, 1.0)
    assert first["warnings"] == ["1 of 4 samples of sums have no score and are left out of its mean"]


def test_warnings_survive_a_start_of_the_trainer(tmp_path: Path) -> None:
    before = RunReport(tmp_path)
    before.write(1, {"eval_error": 1.0}, ["why"])
    after = RunReport(tmp_path)
    after.resume(1)
    assert [(row.step, list(row.warnings), dict(row.metrics)) for row in after.rows] == [
        (1, ["why"], {"eval_error": 1.0})
    ]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["warnings"] == ["why"]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], [0, 6]),
        (["--eval-interval", "2"], [0, 2, 4, 6]),
        (["--eval-interval", "4"], [0, 4, 6]),
        (["--eval-interval", "4", "--skip-eval-before-train"], [4, 6]),
    ],
)
def test_evaluations_are_due_as_eval_interval_and_skip_eval_before_train_say(
    tmp_path: Path, load_with, flags: list[str], steps: list[int]
) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a"}\n')
    data = ["--eval-prompt-data", "sums", str(tmp_path / "eval.jsonl"), "--num-rollout", "6"]
    schedule = schedule_of(load_with(*data, *flags))
    assert [step for step in range(7) if schedule.evaluates(TrainState(step, step, 1))] == steps


def test_without_eval_prompt_data_no_evaluation_is_due(load_with) -> None:
    assert not schedule_of(load_with()).evaluates(TrainState(0, 0, 1))


@pytest.mark.parametrize(
    ("flags", "due", "steps"),
    [
        (["--save-interval", "2"], "saves", [2, 4, 5]),
        ([], "saves", [5]),
        (["--update-weights-interval", "2", "--max-staleness", "1"], "publishes", [2, 4, 5]),
        ([], "publishes", [1, 2, 3, 4, 5]),
    ],
)
def test_checkpoints_and_publications_are_due_at_their_intervals(
    load_with, flags: list[str], due: str, steps: list[int]
) -> None:
    schedule = schedule_of(load_with("--num-rollout", "5", *flags))
    assert [step for step in range(1, 6) if getattr(schedule, due)(TrainState(step, step, 1))] == steps
