"""An evaluation goes on at another rollout service when its own one dies."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import Unavailable
from headrace.sample_log import SampleLog
from tests.unit.trainer.serving.test_evaluation import RESULT, Rollout, run_of


async def test_an_evaluation_whose_rollout_service_dies_is_begun_again_by_another_one(
    tmp_path: Path, load_with
) -> None:
    rollout = Rollout(Unavailable("it is gone"), [RESULT])
    run = run_of(tmp_path, load_with, rollout, "--eval-exact-version")
    await run.train()
    assert run.evaluated() == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert rollout.asked == [0, 0, 1, 2]
    assert len(list(SampleLog(tmp_path / "samples").of_evaluation(0))) == 1, "those of the second one alone"
