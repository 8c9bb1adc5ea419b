"""The engines' busy share: of requests, of standstills, and as commits answer it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import Activity, EngineState
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from tests.support.fakes.fake_fleet import FakeFleet
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, send


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_requests_keep_as_many_engines_busy_as_there_are_requests(clock: Clock) -> None:
    activity = Activity(4, clock)
    assert activity.lap() is None
    with activity.requests():
        clock.seconds += 4.0  # 1 of 4 engines
        with activity.requests(7):
            clock.seconds += 2.0  # all of them
    clock.seconds += 4.0  # none
    assert activity.lap() == pytest.approx((4.0 * 0.25 + 2.0) / 10.0)


def test_a_lap_begins_where_the_one_before_it_ended(clock: Clock) -> None:
    activity = Activity(1, clock)
    with activity.requests():
        clock.seconds += 5.0
        activity.lap()
        clock.seconds += 3.0
    clock.seconds += 1.0
    assert activity.lap() == pytest.approx(0.75)


async def test_a_commit_answers_the_share_since_the_commit_before(fakes: FakeFleet, clock: Clock) -> None:
    activity = fakes.fleet.activity = Activity(2, clock)
    receiver = Receiver(fakes.fleet)
    assert (await publish(receiver, PLAN)).busy_share is None
    with activity.requests():
        clock.seconds += 4.0
        await receiver.begin(replace(PLAN, publication_id="p2"))
        await receiver.receive("p2", 0)
        clock.seconds += 5.0  # the engines stand still
        await receiver.receive("p2", 1)
        clock.seconds += 1.0
        committed = await receiver.commit("p2", CHECKSUMS)
    assert committed.busy_share == pytest.approx(0.25)


async def test_engines_that_an_abort_lets_go_on_are_busy_again(fakes: FakeFleet, clock: Clock) -> None:
    activity = fakes.fleet.activity = Activity(2, clock)
    activity.lap()
    receiver = Receiver(fakes.fleet)
    await receiver.begin(PLAN)
    await fakes.until(lambda: all("/begin_weight_update" in fakes.fake(number).calls for number in (0, 1)))
    await receiver.abort("p1", "the trainer ended")
    assert [engine.state for engine in fakes.fleet.engines] == [EngineState.READY] * 2
    with activity.requests(2):
        clock.seconds += 1.0
    assert activity.lap() == 1.0


async def test_an_engine_that_joins_alone_stops_nobody_and_ends_no_lap(fakes: FakeFleet, clock: Clock) -> None:
    activity = fakes.fleet.activity = Activity(2, clock)
    receiver = Receiver(fakes.fleet)
    await publish(receiver, PLAN)
    await fakes.fleet.hold_back(fakes.fleet.engines[1])
    with activity.requests(2):
        clock.seconds += 1.0
        alone = replace(PLAN, publication_id="alone", engine_ids=("engine-1",))
        await receiver.begin(alone)
        await receiver.receive("alone", 0)
        clock.seconds += 1.0
        await receiver.receive("alone", 1)
        assert (await receiver.commit("alone", CHECKSUMS)).busy_share is None
    assert activity.lap() == 1.0


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_generation_counts_while_the_engine_works_on_it(
    fakes: FakeFleet, clock: Clock, *, streaming: bool
) -> None:
    activity = Activity(1, clock)
    activity.lap()
    client, engine = fakes.fleet.engines[0].client, fakes.fake(0)
    generator = Generator(client, fakes.fleet.weights, activity=activity)
    await client.pause("in_place")  # holds the request until the clock has moved
    generating = asyncio.create_task(generate(generator, streaming=streaming))
    await fakes.until(lambda: engine.num_in_flight == 1)
    clock.seconds += 3.0
    await client.resume()
    await generating
    clock.seconds += 1.0
    assert activity.lap() == pytest.approx(0.75)


async def generate(generator: Generator, *, streaming: bool) -> None:
    params = SamplingParams(max_new_tokens=4)
    if not streaming:
        await generator.generate((1, 2), params, request_id="r", seconds=60.0)
        return
    async for _ in generator.stream((1, 2), params, request_id="r", seconds=60.0):
        pass


async def publish(receiver: Receiver, plan: Plan) -> CommitResult:
    await send(receiver, plan)
    return await receiver.commit(plan.publication_id, CHECKSUMS)
