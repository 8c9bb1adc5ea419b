from __future__ import annotations

import asyncio

import pytest

from headrace.errors import Unavailable
from services.rollout.engine.fleet import Engine, EngineSlot, EngineState
from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet


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


async def test_an_engine_that_ends_again_and_again_stays_down_and_says_why() -> None:
    async with fake_fleet(max_restarts=2) as fakes:
        one, other = fakes.fleet.engines
        lost = asyncio.create_task(fakes.fleet.lost())
        for restarts in (1, 2):
            fakes.fake(0).die()
            await fakes.until(lambda count=restarts: (one.restarts, one.state) == (count, EngineState.READY))
        fakes.fake(0).die()
        await fakes.until(lambda: one.state is EngineState.QUARANTINED)
        assert "ended with exit code -9" in one.trouble
        assert (fakes.routing.urls, [e.engine_id for e in fakes.fleet.alive()]) == ({other.url}, ["engine-1"])
        await fakes.fleet.switch_to(7)  # a version that it will never have
        assert (one.state, lost.done()) == (EngineState.QUARANTINED, False)
        for restarts in (0, 1, 2):
            await fakes.until(lambda count=restarts: (other.restarts, other.state) == (count, EngineState.STALE))
            fakes.fake(1).die()
        with pytest.raises(Unavailable, match=r"every engine ended too often:\nengine-0: ended with (.|\n)*engine-1: "):
            await lost


async def test_an_engine_that_failed_publications_end_is_started_again_each_time() -> None:
    async with fake_fleet(max_restarts=1) as fakes:
        one = fakes.fleet.engines[0]
        for restarts in range(4):
            await fakes.until(lambda count=restarts: (one.restarts, one.state) == (count, EngineState.READY))
            await fakes.fleet.give_up(one, "publication aborted")
        await fakes.until(lambda: (one.restarts, one.state) == (4, EngineState.READY))


def test_a_long_life_forgives_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("services.rollout.engine.fleet.time.monotonic", lambda: now)
    engine = Engine(0, EngineSlot(1))
    seen = []
    for life in (1, 1, 599, 600, 1):
        engine.began_to_serve()
        now += life
        seen.append(engine.ended("gone", 600.0))
    assert seen == [1, 2, 3, 1, 2]
    assert [engine.ended("not started", 600.0) for _ in range(2)] == [3, 4]
