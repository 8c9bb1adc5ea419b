"""Engines that come and go while others serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headrace.errors import (
    ChecksumMismatch,
    FailedPrecondition,
    GroupGone,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.job.engine_shape import EngineShape
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import Engine, EngineState
from services.rollout.engine.scaling import Capacity, Scaler
from services.rollout.production.generator import Generator
from services.rollout.publication.receiver import Receiver
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet
from tests.support.fakes.hostile_engine import TakingTurns
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, publish

READY, STALE, LEAVING = EngineState.READY, EngineState.STALE, EngineState.LEAVING
PROMPT = (3, 1, 4, 1, 5)


@asynccontextmanager
async def scaled(
    fakes: FakeFleet, most: int | None = 8, num_slots: int | None = None
) -> AsyncIterator[tuple[Scaler, Receiver]]:
    scaler, receiver = Scaler(fakes.fleet, Capacity(most=most, num_slots=num_slots)), Receiver(fakes.fleet)
    try:
        yield scaler, receiver
    finally:
        await receiver.close()
        await scaler.stop()


def states(fakes: FakeFleet) -> dict[str, EngineState]:
    return {engine.engine_id: engine.state for engine in fakes.fleet.engines}


async def to_be(fakes: FakeFleet, **wanted: EngineState) -> None:
    """Returns once the fleet has these engines in these states, and no other ones."""
    await fakes.until(lambda: states(fakes) == {name.replace("_", "-"): state for name, state in wanted.items()})


def process_of(engine: Engine) -> FakeEngine:
    assert isinstance(engine.process, FakeEngine)
    return engine.process


async def test_engines_come_into_routing_and_leave_it_and_their_processes_end(fakes: FakeFleet) -> None:
    async with scaled(fakes) as (scaler, _):
        more = await scaler.scale(4, drain_seconds=0)
        assert (more.wanted_before, more.coming, more.leaving) == (2, ("engine-2", "engine-3"), ())
        await to_be(fakes, engine_0=READY, engine_1=READY, engine_2=READY, engine_3=READY)
        assert fakes.routing.urls == {e.url for e in fakes.fleet.engines}
        assert [e.restarts for e in fakes.fleet.engines] == [0, 0, 0, 0]
        ending = [process_of(engine) for engine in fakes.fleet.engines[1:]]
        fewer = await scaler.scale(1, drain_seconds=0)
        assert fewer.leaving == ("engine-3", "engine-2", "engine-1")
        await to_be(fakes, engine_0=READY)
        assert fakes.routing.urls == {fakes.fleet.engines[0].url}
        assert [process.exit_code for process in ending] == [0, 0, 0]


async def test_a_leaving_engines_requests_finish_in_time_or_are_continued_elsewhere_from_their_tokens() -> None:
    async with fake_fleet(2, token_seconds=0.02) as fakes, scaled(fakes) as (scaler, _):
        router = TakingTurns(fakes.routing)
        generator = Generator(router, fakes.fleet.weights, fakes.fleet.suspect)

        async def ask(name: str, tokens: int) -> list[int]:
            params = SamplingParams(max_new_tokens=tokens)
            return list((await generator.generate(PROMPT, params, request_id=name, seconds=60)).tokens)

        try:
            staying, leaving = (process_of(engine) for engine in fakes.fleet.engines)
            asked = {name: asyncio.create_task(ask(name, 20)) for name in ("one", "two")}
            await fakes.until(lambda: staying.num_in_flight == leaving.num_in_flight == 1)
            await scaler.scale(1, drain_seconds=60)
            await fakes.until(lambda: len(fakes.fleet.engines) == 1)
            assert await asyncio.gather(*asked.values()) == [response_to(PROMPT, 20)] * 2
            assert "/abort_request" not in leaving.calls[: leaving.calls.index("/v1/loads") + 2]
            assert len(staying.bodies) == len(leaving.bodies) == 1, "one was asked twice: it had not finished"

            await scaler.scale(2, drain_seconds=0)
            await to_be(fakes, engine_0=READY, engine_1=READY)
            other = process_of(fakes.fleet.engines[1])
            asked = {name: asyncio.create_task(ask(name, 60)) for name in ("three", "four")}
            await fakes.until(lambda: other.num_tokens >= 3)
            await scaler.scale(1, drain_seconds=0)
            await fakes.until(lambda: len(fakes.fleet.engines) == 1)
            assert await asyncio.gather(*asked.values()) == [response_to(PROMPT, 60)] * 2
            assert len(staying.bodies[-1]["input_ids"]) >= len(PROMPT) + 3, "its tokens were made again"
        finally:
            await router.close()


async def test_an_engine_leaves_after_the_publication_that_it_takes_part_in(fakes: FakeFleet) -> None:
    async with scaled(fakes) as (scaler, receiver):
        await receiver.begin(PLAN)
        assert (await scaler.scale(1, drain_seconds=0)).leaving == ("engine-1",)
        assert (await scaler.scale(1, drain_seconds=0)).leaving == ()
        await receiver.receive("p1", 0)
        assert set(states(fakes).values()) == {EngineState.UPDATING}
        await receiver.receive("p1", 1)
        assert (await receiver.commit("p1", CHECKSUMS)).engine_ids == ("engine-0", "engine-1")
        await to_be(fakes, engine_0=READY)


async def test_a_larger_number_keeps_an_engine_that_a_publication_holds(fakes: FakeFleet) -> None:
    async with scaled(fakes) as (scaler, receiver):
        await receiver.begin(PLAN)
        await scaler.scale(1, drain_seconds=0)
        back = await scaler.scale(2, drain_seconds=0)
        assert (back.wanted_before, back.coming) == (1, ("engine-1",))
        await receiver.receive("p1", 0)
        await receiver.receive("p1", 1)
        await receiver.commit("p1", CHECKSUMS)
        await to_be(fakes, engine_0=READY, engine_1=READY)
        assert [engine.restarts for engine in fakes.fleet.engines] == [0, 0]


async def test_an_engine_that_comes_during_a_publication_waits_for_the_weights_alone(fakes: FakeFleet) -> None:
    async with scaled(fakes) as (scaler, receiver):
        await receiver.begin(PLAN)
        await scaler.scale(3, drain_seconds=0)
        await fakes.until(lambda: states(fakes)["engine-2"] is READY)  # the version before is served
        await receiver.receive("p1", 0)
        await receiver.receive("p1", 1)
        await receiver.commit("p1", CHECKSUMS)
        await to_be(fakes, engine_0=READY, engine_1=READY, engine_2=STALE)
        await publish(receiver, replace(PLAN, publication_id="alone", engine_ids=("engine-2",)))
        await to_be(fakes, engine_0=READY, engine_1=READY, engine_2=READY)


async def test_a_group_is_gone_once_one_of_its_engines_was_replaced_by_another_of_its_number(fakes: FakeFleet) -> None:
    joined = [replace(PLAN.groups[0], joined=True)]
    async with scaled(fakes) as (scaler, receiver):
        await publish(receiver, PLAN)
        await publish(receiver, replace(PLAN, publication_id="p2", groups=joined))
        await scaler.scale(1, drain_seconds=0)
        await to_be(fakes, engine_0=READY)
        with pytest.raises(GroupGone):
            await receiver.begin(replace(PLAN, publication_id="p3", groups=joined))
        await scaler.scale(2, drain_seconds=0)
        await to_be(fakes, engine_0=READY, engine_1=STALE)
        with pytest.raises(GroupGone):
            await receiver.begin(replace(PLAN, publication_id="p4", groups=joined))
        begun = await receiver.begin(replace(PLAN, publication_id="p5", groups=[replace(PLAN.groups[0], name="new")]))
        assert (begun.world_size, begun.engine_ids) == (3, ("engine-0", "engine-1"))


async def test_engines_that_do_not_serve_leave_first() -> None:
    async with fake_fleet(3, max_restarts=0) as fakes, scaled(fakes) as (scaler, _):
        fakes.fake(0).die()
        await fakes.until(lambda: states(fakes)["engine-0"] is EngineState.QUARANTINED)
        assert (await scaler.scale(2, drain_seconds=0)).leaving == ("engine-0",)
        await to_be(fakes, engine_1=READY, engine_2=READY)
        assert (await scaler.scale(3, drain_seconds=0)).coming == ("engine-0",)
        await to_be(fakes, engine_0=READY, engine_1=READY, engine_2=READY)


async def test_a_fleet_whose_last_serving_engine_leaves_is_lost() -> None:
    async with fake_fleet(2, max_restarts=0) as fakes:
        lost = asyncio.create_task(fakes.fleet.lost())
        fakes.fake(0).die()
        await fakes.until(lambda: states(fakes)["engine-0"] is EngineState.QUARANTINED)
        await fakes.fleet.retire(fakes.fleet.engines[1], drain_seconds=0)
        with pytest.raises(Unavailable, match="engine-0: ended with exit code -9"):
            await lost


async def test_an_engine_comes_to_gpus_once_the_one_that_leaves_them_has_ended(fakes: FakeFleet) -> None:
    async with scaled(fakes, most=None, num_slots=2) as (scaler, _):
        fakes.routing.answers.clear()
        await scaler.scale(1, drain_seconds=0)
        await to_be(fakes, engine_0=READY, engine_1=LEAVING)
        leaving = fakes.fleet.engines[1]
        assert (await scaler.scale(2, drain_seconds=0)).coming == ()
        assert len(fakes.fleet.engines) == 2
        fakes.routing.answers.set()
        await to_be(fakes, engine_0=READY, engine_1=READY)
        assert fakes.fleet.engines[1] is not leaving
        assert process_of(leaving).exit_code == 0


async def test_numbers_that_no_fleet_can_have_are_refused_with_the_way_out(fakes: FakeFleet) -> None:
    for capacity, number, error, said in (
        (Capacity(), 0, InvalidArgument, "at least 1 engine; to generate nothing for a while, call PauseProduction"),
        (Capacity(most=3), 4, InvalidArgument, "4 is above rollout_max_engines 3: scale to 3"),
        (Capacity(num_slots=2), 3, InvalidArgument, "GPUs of rollout_num_gpus are for 2 engines: scale to 2"),
        (Capacity(elsewhere=True), 2, FailedPrecondition, "rollout_external_engine_addrs.*: start or end them there"),
    ):
        scaler = Scaler(fakes.fleet, capacity)
        with pytest.raises(error, match=said):
            await scaler.scale(number, drain_seconds=0)
        assert (scaler.wanted, len(fakes.fleet.engines)) == (2, 2)


async def test_without_a_limit_of_the_job_memory_decides(fakes: FakeFleet) -> None:
    scaler = Scaler(fakes.fleet, Capacity(free_bytes=lambda: (2 << 30) + (512 << 20)))
    with pytest.raises(ResourceExhausted, match="no engine runs now that shows how much"):
        await scaler.scale(3, drain_seconds=0)
    fakes.fake(0).takes_bytes = 1 << 30
    with pytest.raises(ResourceExhausted, match=r"an engine takes 1.1 GB here, and 2.1 GB .* scale to 4, lower"):
        await scaler.scale(5, drain_seconds=0)
    await scaler.scale(4, drain_seconds=0)
    with pytest.raises(ResourceExhausted, match="scale to 4"):  # those that start will take theirs
        await scaler.scale(5, drain_seconds=0)
    await scaler.scale(1, drain_seconds=0)
    await to_be(fakes, engine_0=READY)


@pytest.mark.parametrize("right", [True, False])
async def test_engines_of_one_size_are_compared_with_each_other(fakes: FakeFleet, right: bool) -> None:
    """Each size cuts the weights in its own way: engine-0 and engine-2 are of one, engine-1 is of another."""
    async with scaled(fakes) as (scaler, receiver):
        await scaler.scale(3, drain_seconds=0)
        await to_be(fakes, engine_0=READY, engine_1=READY, engine_2=READY)
        fakes.fleet.engines[1].shape = EngineShape(2)
        begun = await receiver.begin(PLAN)
        assert begun.world_size == 1 + 1 + 2 + 1
        await receiver.receive("p1", 0)
        await receiver.receive("p1", 1)
        process_of(fakes.fleet.engines[1 if right else 2]).weights["a"] = "cut in another way"
        if right:
            assert len((await receiver.commit("p1", {})).engine_ids) == 3
        else:
            with pytest.raises(ChecksumMismatch, match="engines differ from each other"):
                await receiver.commit("p1", {})


async def test_the_busy_share_follows_the_engines_that_serve(fakes: FakeFleet) -> None:
    async with scaled(fakes) as (scaler, receiver):
        await publish(receiver, PLAN)
        await scaler.scale(1, drain_seconds=0)
        await to_be(fakes, engine_0=READY)
        assert fakes.fleet.activity.num_engines == 1
        await scaler.scale(3, drain_seconds=0)
        await to_be(fakes, engine_0=READY, engine_1=STALE, engine_2=STALE)
        assert fakes.fleet.activity.num_engines == 1
        await publish(receiver, replace(PLAN, publication_id="alone", engine_ids=("engine-1",)))
        assert fakes.fleet.activity.num_engines == 2
        await publish(receiver, replace(PLAN, publication_id="p2", policy_version=4))
        assert fakes.fleet.activity.num_engines == 3
