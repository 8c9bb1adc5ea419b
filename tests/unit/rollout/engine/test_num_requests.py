"""What an engine says about its load, and what it may not say."""

from __future__ import annotations

import pytest

from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.answers.others import read_num_requests


def load(running: object, waiting: object) -> dict[str, object]:
    return {"num_running_reqs": running, "num_waiting_reqs": waiting, "memory": None}


def test_requests_of_all_ranks_are_added_up() -> None:
    assert read_num_requests({"loads": [load(3, 1), load(0, 2)]}) == 6
    assert read_num_requests({"loads": []}) == 0


@pytest.mark.parametrize(
    "reply", [{}, {"loads": 3}, {"loads": [3]}, *({"loads": [load(bad, 0)]} for bad in (-1, True, 1.5, "1", None))]
)
def test_anything_else_is_a_bad_answer(reply: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        read_num_requests(reply)
