"""Weights that engines loaded themselves are compared, and served without a standstill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument
from services.rollout.engine.fleet import EngineState
from services.rollout.publication.receiver import Receiver
from tests.support.fakes.fake_fleet import WIRE, FakeFleet
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, publish

LOADED = replace(PLAN, publication_id="p0", policy_version=0, groups=[], is_loaded=True)


def load(fakes: FakeFleet, **others: str) -> None:
    for number in (0, 1):
        fakes.fake(number).weights = {**WIRE, **others}


async def test_engines_that_loaded_the_weights_serve_them_without_standing_still(fakes: FakeFleet) -> None:
    load(fakes)
    receiver = Receiver(fakes.fleet)
    assert (await receiver.begin(LOADED)).engine_ids == ("engine-0", "engine-1")
    committed = await receiver.commit("p0", CHECKSUMS)
    assert committed.engine_ids == ("engine-0", "engine-1")
    assert committed.paused_seconds == 0.0
    assert committed.weights_digest == fakes.fleet.engines[1].weights_digest != ""
    assert all(engine.state is EngineState.READY for engine in fakes.fleet.engines)
    calls = {call for number in (0, 1) for call in fakes.fake(number).calls}
    assert "/weights_checker" in calls
    assert calls.isdisjoint({"/pause_generation", "/init_weights_update_group", "/begin_weight_update"})


async def test_engines_that_loaded_others_go_on_as_before_and_get_them(fakes: FakeFleet) -> None:
    load(fakes, b="a quantized b")
    receiver = Receiver(fakes.fleet)
    await receiver.begin(LOADED)
    with pytest.raises(ChecksumMismatch, match="2 of 3|1 of 3"):
        await receiver.commit("p0", CHECKSUMS)
    await fakes.until(lambda: all(engine.state is EngineState.READY for engine in fakes.fleet.engines))
    assert [engine.restarts for engine in fakes.fleet.engines] == [0, 0]
    assert await publish(receiver, replace(PLAN, policy_version=0)) == ("engine-0", "engine-1")


async def test_engines_that_were_given_weights_are_refused(fakes: FakeFleet) -> None:
    receiver = Receiver(fakes.fleet)
    await publish(receiver, PLAN)
    with pytest.raises(FailedPrecondition, match="hold other weights than those that they loaded"):
        await receiver.begin(replace(LOADED, epoch=2))
    assert all(engine.state is EngineState.READY for engine in fakes.fleet.engines)


async def test_nothing_travels(fakes: FakeFleet) -> None:
    load(fakes)
    receiver = Receiver(fakes.fleet)
    await receiver.begin(LOADED)
    with pytest.raises(InvalidArgument, match="commit them"):
        await receiver.receive("p0", 0)
    await receiver.commit("p0", CHECKSUMS)
    for contradiction in ({"groups": PLAN.groups}, {"engine_ids": ("engine-0",)}):
        with pytest.raises(InvalidArgument, match="belong to no group"):
            replace(LOADED, **contradiction)  # type: ignore[arg-type]
