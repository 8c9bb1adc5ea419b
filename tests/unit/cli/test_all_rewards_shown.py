"""What the console shows of the rewards of all groups, those that a filter dropped too."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.api.trainer.v1 import trainer_pb2
from tests.support.run_views import view_of


def test_the_console_shows_it_first_and_then_that_of_the_trained_samples(load_with) -> None:
    view = view_of(load_with())
    for step in range(1, 7):
        metrics = {"reward/mean": 0.5, "reward/all/mean": step / 10}
        row = trainer_pb2.WatchProgressResponse(step=step, time=Timestamp(seconds=step), metrics=metrics)
        view.on_progress(row)
    assert "reward 0.600, of trained 0.500" in view.unread()[-1]
    assert "mean reward: first three steps 0.200, last three 0.500" in view.summary()


@pytest.mark.parametrize(
    ("metrics", "is_called_out"),
    [
        ({"reward/mean": 1.0, "reward/std": 0.0, "samples/count": 32.0}, True),
        ({"reward/mean": 0.0, "reward/all/mean": 0.4, "reward/std": 0.0, "samples/count": 8.0}, True),
        ({"reward/mean": -1.0, "reward/std": 0.0, "samples/count": 2.0}, True),
        ({"reward/mean": 0.5, "reward/std": 0.5, "samples/count": 32.0}, False),
        ({"reward/mean": 1.0, "reward/std": 0.0, "samples/count": 1.0}, False),
        ({"loss/sft": 2.0, "samples/count": 32.0}, False),
    ],
)
def test_a_step_in_which_all_rewards_are_equal_is_called_out(
    load_with, metrics: dict[str, float], is_called_out: bool
) -> None:
    view = view_of(load_with())
    view.on_progress(trainer_pb2.WatchProgressResponse(step=1, time=Timestamp(seconds=1), metrics=metrics))
    assert ("nothing to learn in this step" in view.unread()[-1]) == is_called_out
