"""What engines say of their load, and the limit of groups that follows it, over fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from services.rollout.admission import GroupsLimit, LoadWatch
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.replies import BadAnswer, EngineLoad, read_load
from tests.support.fakes.fake_fleet import FakeFleet

RANK = {"num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.25, "queues": {"retracted": 1}}


def test_a_load_is_the_sum_of_the_ranks_and_the_fullest_cache() -> None:
    other = {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.75}
    assert read_load(json.dumps({"loads": [RANK, other]}).encode()) == EngineLoad(4, 2, 0.75, 1)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"loads": []},
        {"loads": {"a": 1}},
        {"loads": [7]},
        {"loads": [{**RANK, "num_waiting_reqs": -1}]},
        {"loads": [{**RANK, "num_running_reqs": True}]},
        {"loads": [{**RANK, "token_usage": float("nan")}]},
        {"loads": [{**RANK, "token_usage": 7}]},
        {"loads": [{**RANK, "queues": [1]}]},
        {"loads": [{**RANK, "queues": {"retracted": "many"}}]},
    ],
)
def test_an_impossible_load_is_a_bad_answer(reply: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        read_load(json.dumps(reply).encode())


async def test_the_limit_falls_while_requests_queue_at_the_engines_and_rises_again(fakes: FakeFleet) -> None:
    told: list[int] = []
    limit = GroupsLimit(8)
    watch = LoadWatch(
        lambda: fakes.fleet.engines, limit, lambda: limit.now, told.append, lambda _: None, look_seconds=0.01
    )
    engine = fakes.fake(0)
    engine.max_running = 2
    engine.token_seconds = 0.02
    asking = [
        asyncio.create_task(
            fakes.fleet.engines[0].client.generate(
                (1, 2), SamplingParams(max_new_tokens=5000), request_id=f"r{number}", cache_key="c", seconds=60
            )
        )
        for number in range(8)
    ]
    watch.start()
    await fakes.until(lambda: limit.now == 1)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await fakes.until(lambda: limit.now == 8)
    await watch.stop()
    assert told[-1] == 8
    assert min(told) == 1


async def test_an_engine_that_does_not_answer_changes_nothing_and_ends_nothing(fakes: FakeFleet) -> None:
    told: list[int] = []
    watch = LoadWatch(lambda: fakes.fleet.engines, GroupsLimit(8), lambda: 8, told.append, lambda _: None)
    for number in (0, 1):
        fakes.fake(number).faults["/v1/loads"] = "missing"
    for _ in range(4):
        await watch.look()
    assert told == []
    fakes.fake(0).faults.clear()
    fakes.fake(0).cache_usage = 0.99
    for _ in range(4):
        await watch.look()
    assert told == [6], "one of them is enough"
    with contextlib.suppress(asyncio.CancelledError):
        await watch.stop()
