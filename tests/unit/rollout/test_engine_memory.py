"""Engines on a device that they share with the trainer: they release it, take it back, and die in the middle of both.

The device refuses whoever takes memory while the other side has some, and the engines end where SGLang would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.errors import Aborted, FailedPrecondition, Fenced, InvalidArgument
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine_memory import EngineMemory, require_shared
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from tests.support.devices.memory_engine import MemoryEngine
from tests.support.devices.shared_device import SharedDevice
from tests.support.fakes.fake_fleet import RememberedRouting

CALLS = ("/pause_generation", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation")
TIMING = FleetTiming(start_seconds=60, check_interval_seconds=0.02, check_timeout_seconds=10.0, max_restarts=1000)
PLAN = Plan("p", 1, 1, "in_place", "gloo", 60.0, {}, (), is_loaded=True)


@dataclass
class Production:
    paused: set[str] = field(default_factory=set)

    def pause(self, by: str) -> None:
        self.paused.add(by)

    def resume(self, by: str) -> None:
        self.paused.discard(by)


@dataclass
class Shared:
    fleet: Fleet
    receiver: Receiver
    turn: EngineMemory
    production: Production
    device: SharedDevice

    def fake(self, number: int) -> MemoryEngine:
        process = self.fleet.engines[number].process
        assert isinstance(process, MemoryEngine)
        return process

    @property
    def states(self) -> list[EngineState]:
        return [engine.state for engine in self.fleet.engines]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # another party's state
                await asyncio.sleep(0.005)

    def the_trainer_computes(self) -> None:
        """The device would refuse it beside an engine."""
        self.device.take("trainer", "trainer")
        self.device.give("trainer")


@asynccontextmanager
async def shared(folder: Path, may_start: Callable[[], bool] = lambda: True) -> AsyncIterator[Shared]:
    """Two engines of a service that has just started."""
    device, production = SharedDevice(folder), Production()

    def build(number: int) -> MemoryEngine:
        assert may_start()
        return MemoryEngine(number, device, token_seconds=0.001)

    fleet = Fleet(2, 1, build, RememberedRouting(), TIMING)
    receiver = Receiver(fleet)
    turn = EngineMemory(fleet, production, receiver)
    starting = asyncio.create_task(fleet.start())
    try:
        yield Shared(fleet, receiver, turn, production, device)
        assert not [event for event in device.events if event.startswith("REFUSED")]
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await turn.stop()
        await receiver.close()
        await fleet.stop()


async def test_a_service_that_starts_leaves_the_devices_to_the_trainer_until_it_is_told(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        assert it.turn.is_trainers
        assert it.production.paused
        with pytest.raises(Aborted) as refused:  # by a trainer that gave the devices to the service before this one
            await it.receiver.begin(PLAN)
        assert refused.value.reason == "MEMORY_RELEASED"
        assert await it.turn.release(0) == []
        it.the_trainer_computes()
        assert it.device.events == ["trainer takes", "trainer gives"]
        assert await it.turn.resume(1) == ["engine-0", "engine-1"]
        assert not it.turn.is_trainers
        assert not it.production.paused


async def test_released_engines_have_no_memory_and_take_it_back_once_however_often_they_are_told(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as it:
        await it.turn.resume(1)
        client = it.fleet.engines[0].client
        asked = asyncio.create_task(
            client.generate((1, 2), SamplingParams(100_000), request_id="r", cache_key="c", seconds=100)
        )
        await it.until(lambda: it.fake(0).num_in_flight == 1)
        assert await it.turn.release(1) == await it.turn.release(2) == ["engine-0", "engine-1"]
        assert not (await asked).finish.is_final
        assert it.states == [EngineState.RELEASED] * 2
        it.the_trainer_computes()
        assert await it.turn.resume(2) == await it.turn.resume(2) == ["engine-0", "engine-1"]
        assert it.states == [EngineState.STALE] * 2, "they have no weights"
        assert all(engine.restarts == 0 for engine in it.fleet.engines)


async def test_an_engine_that_dies_while_the_trainer_has_the_devices_starts_in_the_engines_turn(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.turn.resume(1)
        await it.turn.release(1)
        it.fake(1).die()
        await it.until(lambda: it.states[1] is EngineState.DOWN)
        it.the_trainer_computes()
        assert await it.turn.release(1) == ["engine-0"]
        assert await it.turn.resume(1) == ["engine-0"], "it is not waited for: it gets its weights when it is there"
        await it.until(lambda: it.fleet.engines[1] in it.fleet.alive())
        assert it.fleet.engines[1].restarts == 1


@pytest.mark.parametrize(
    ("call", "fault"), [*((call, "die") for call in CALLS), (CALLS[2], "refuse"), (CALLS[2], "refuse_for_now")]
)
async def test_an_engine_that_fails_in_a_call_of_a_turn_is_ended_and_starts_in_the_next_turn_of_the_engines(
    tmp_path: Path, call: str, fault: str
) -> None:
    async with shared(tmp_path) as it:
        await it.turn.resume(1)
        it.fake(0).faults[call] = fault  # type: ignore[assignment]
        released = await it.turn.release(1)
        assert released == (["engine-0", "engine-1"] if call == CALLS[-1] else ["engine-1"])
        it.the_trainer_computes()
        assert await it.turn.resume(1) == ["engine-1"]
        await it.until(lambda: len(it.fleet.alive()) == 2)
        assert [engine.restarts for engine in it.fleet.engines] == [1, 0]


async def test_a_publication_that_a_trainer_left_open_is_aborted_when_the_next_one_takes_the_devices(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as it:
        await it.turn.resume(1)
        await it.receiver.begin(PLAN)
        assert await it.turn.release(0) == ["engine-0", "engine-1"]
        assert it.receiver.open_id == ""
        it.the_trainer_computes()


async def test_an_older_trainer_moves_no_devices(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.turn.resume(2)
        for call in (it.turn.release, it.turn.resume):
            with pytest.raises(Fenced):
                await call(1)
            with pytest.raises(InvalidArgument, match="epoch is -1"):
                await call(-1)
        with pytest.raises(InvalidArgument, match="from 1 on"):
            await it.turn.resume(0)
        with pytest.raises(FailedPrecondition, match="neither --colocate nor --offload-rollout"):
            require_shared(None)
