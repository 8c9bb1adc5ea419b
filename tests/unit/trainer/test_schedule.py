"""The steps at which evaluations, checkpoints and publications are due."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.control.build import schedule_of
from services.trainer.state import TrainState


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], [0, 6]),
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
    assert [step for step in range(7) if schedule.evaluates(step)] == steps


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


def test_each_data_set_of_an_eval_config_is_due_at_its_own_interval(tmp_path: Path, load_with) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a"}\n')
    sets = ((name, f"interval = {every}" if every else "") for name, every in (("two", 2), ("three", 3), ("job", None)))
    tables = (f'[[datasets]]\nname = "{name}"\npath = "eval.jsonl"\n{interval}\n' for name, interval in sets)
    (tmp_path / "eval.toml").write_text("".join(tables))
    given = ["--eval-config", str(tmp_path / "eval.toml"), "--eval-interval", "4", "--num-rollout", "7"]
    schedule = schedule_of(load_with(*given))
    everything = ("two", "three", "job")
    assert [schedule.evaluates(step) for step in range(8)] == [
        *(everything, (), ("two",), ("three",), ("two", "job"), (), ("two", "three"), everything)
    ]
