from __future__ import annotations

import asyncio

from services.rollout.engine.fleet import EngineState
from tests.support.fakes.fake_fleet import FakeFleet


async def test_started_engines_are_in_routing(fakes: FakeFleet) -> None:
    assert [e.state for e in fakes.fleet.engines] == [EngineState.READY, EngineState.READY]
    assert fakes.routing.urls == {e.url for e in fakes.fleet.engines}


async def test_every_engine_freezes_its_garbage_collection_before_it_serves(fakes: FakeFleet) -> None:
    """A publication empties its cache, which is half a second of garbage collection in an engine that did not."""
    fakes.fake(0).die()
    await fakes.until(lambda: fakes.fleet.engines[0].restarts == 1 and len(fakes.routing.urls) == 2)
    for number in (0, 1):
        calls = fakes.fake(number).calls
        assert calls.index("/freeze_gc") < calls.index("/update_weight_version")


async def test_a_dead_engine_is_restarted_and_serves_while_the_initial_weights_are_served(fakes: FakeFleet) -> None:
    old_url = fakes.fleet.engines[0].url
    fakes.fake(0).die()
    await fakes.until(lambda: fakes.fleet.engines[0].restarts == 1 and len(fakes.routing.urls) == 2)
    assert fakes.fleet.engines[0].state is EngineState.READY
    assert old_url not in fakes.routing.urls


async def test_a_restarted_engine_is_stale_once_other_weights_are_served(fakes: FakeFleet) -> None:
    await fakes.fleet.switch_to(7)
    assert fakes.routing.urls == set()
    await fakes.fleet.serve(fakes.fleet.engines[1], 7)
    fakes.fake(0).die()
    await fakes.until(lambda: fakes.fleet.engines[0].state is EngineState.STALE)
    assert fakes.routing.urls == {fakes.fleet.engines[1].url}


async def test_one_missed_check_is_forgiven_and_several_in_a_row_are_not(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    fake = fakes.fake(0)
    seen = fake.calls.count("/model_info")
    fake.faults["/model_info"] = "hang"
    await fakes.until(lambda: fake.calls.count("/model_info") > seen)
    fake.faults.clear()
    await fakes.until(lambda: fake.calls.count("/model_info") > seen + 6)
    assert (engine.restarts, engine.state) == (0, EngineState.READY)
    fake.faults["/model_info"] = "hang"
    await fakes.until(lambda: engine.restarts == 1)


async def test_an_engine_that_ends_while_it_is_given_up_is_started_once(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    fakes.routing.answers.clear()
    giving_up = asyncio.create_task(fakes.fleet.give_up(engine, "gone in the middle of a collective"))
    await fakes.until(lambda: engine.state is EngineState.DOWN)
    fakes.fake(0).die()
    await fakes.until(lambda: engine.state is EngineState.READY)
    fakes.routing.answers.set()
    await giving_up
    await engine.client.weights_name(seconds=60)
    assert engine.restarts == 1
