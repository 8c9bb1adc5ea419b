"""What the console shows of the rewards of all groups, those that a filter dropped too."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.api.trainer.v1 import trainer_pb2
from tests.support.run_views import view_of


def test_the_console_shows_it_beside_the_batchs_own(load_with) -> None:
    view = view_of(load_with())
    for step in range(1, 7):
        metrics = {"reward/mean": 0.5, "reward/all/mean": step / 10}
        row = trainer_pb2.WatchProgressResponse(step=step, time=Timestamp(seconds=step), metrics=metrics)
        view.on_progress(row)
    assert "reward 0.500, of all groups 0.600" in view.unread()[-1]
    assert "mean reward of all groups: first three steps 0.200, last three 0.500" in view.summary()
