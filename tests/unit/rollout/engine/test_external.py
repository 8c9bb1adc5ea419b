"""Engines that somebody else starts: they are given weights before anything, watched, and left running."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.errors import ConfigError, FailedPrecondition, Unavailable
from headrace.rpc.net import Address, free_port
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.process import ExternalEngine
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import FakeFleet, RememberedRouting

TIMING = FleetTiming(
    start_seconds=60, check_interval_seconds=0.01, check_timeout_seconds=0.2, missed_checks=3, max_restarts=5
)


def address_of(engine: FakeEngine) -> Address:
    return Address.parse(engine.url.removeprefix("http://"))


@pytest.fixture
async def others() -> AsyncIterator[FakeEngine]:
    """A server that runs before and after the fleet."""
    engine = FakeEngine()
    await engine.start(seconds=60)
    yield engine
    await engine.stop()


async def test_it_has_unknown_weights_until_it_is_given_some_and_is_left_running(others: FakeEngine) -> None:
    routing = RememberedRouting()
    external = [ExternalEngine(address_of(others), 1)]
    fleet = Fleet(1, 1, lambda number: external[number], routing, TIMING, begins_with_checkpoint=False)
    await fleet.start()
    (engine,) = fleet.engines
    assert engine.state is EngineState.STALE
    assert routing.urls == set()
    assert fleet.alive() == [engine]
    await fleet.switch_to(0)
    await fleet.serve(engine, 0)
    assert (engine.state, routing.urls) == (EngineState.READY, {others.url})
    await fleet.stop()
    assert "/abort_request" in others.calls, "the requests of this service are ended"
    assert others.exit_code is None


async def test_one_that_goes_away_is_tried_again_and_is_not_trusted_when_it_comes_back(others: FakeEngine) -> None:
    routing = RememberedRouting()
    fleet = Fleet(1, 1, lambda _: ExternalEngine(address_of(others), 1), routing, TIMING, begins_with_checkpoint=False)
    await fleet.start()
    (engine,) = fleet.engines
    await fleet.switch_to(3)
    await fleet.serve(engine, 3)
    others.faults["/model_info"] = others.faults["/server_info"] = "hang"
    until = FakeFleet(fleet, routing).until
    await until(lambda: engine.state is not EngineState.READY)
    assert routing.urls == set()
    others.faults.clear()
    await until(lambda: engine.state is EngineState.STALE)
    assert engine.restarts >= 1
    await fleet.stop()


async def test_an_engine_of_another_size_is_refused_and_one_that_is_not_there_is_waited_for(
    others: FakeEngine,
) -> None:
    with pytest.raises(FailedPrecondition, match="tensor-parallel size of 1, and rollout_num_gpus_per_engine is 2"):
        await ExternalEngine(address_of(others), 2).start(seconds=60)
    nobody = ExternalEngine(Address("127.0.0.1", free_port()), 1)
    with pytest.raises(Unavailable, match="did not answer within 0.6 s .* take its address out"):
        await nobody.start(seconds=0.6)
    await nobody.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("127.0.0.1:1", "127.0.0.1:1"), "has an address twice"),
        (("127.0.0.1:1", "--rollout-num-gpus", "3"), "1 engines of 1 have 1; leave one of them out"),
        (("10.0.0.7:1", "--update-weight-transport", "ipc"), "10.0.0.7:1 may be another"),
        (("127.0.0.1:1", "--debug-rollout-only"), "nothing would give them"),
    ],
)
def test_what_cannot_be_asked_of_them_is_refused(load_with, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_with("--rollout-external-engine-addrs", *flags)
    assert said in refused.value.message
