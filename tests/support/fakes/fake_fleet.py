"""A fleet of fake engines, with routing that only remembers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.rpc.server import RpcServer, Service
from services.rollout import fleet_build
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from tests.support.fakes.fake_engine import FakeEngine

WIRE = {"a": "new a", "b": "new b", "c": "new c"}


class RememberedRouting:
    def __init__(self) -> None:
        self.urls: set[str] = set()
        self.answers = asyncio.Event()
        """Until it is set nobody is taken out."""
        self.answers.set()

    async def add(self, engine_url: str) -> None:
        self.urls.add(engine_url)

    async def remove(self, engine_url: str) -> None:
        await self.answers.wait()
        self.urls.discard(engine_url)


class _NoRouter(RememberedRouting):
    """Stands where sglang-router does, before one engine: those who ask it ask the engine."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def start(self) -> None: ...

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None: ...


@contextlib.contextmanager
def without_router(engine: FakeEngine) -> Iterator[None]:
    """Services that are built in the block start no router: all requests go to the engine."""
    with mock.patch.object(fleet_build, "Router", return_value=_NoRouter(engine.url)):
        yield


@contextlib.asynccontextmanager
async def served_rollout(
    servicer: rollout_pb2_grpc.RolloutServiceServicer, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """Its address."""
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server = RpcServer("rollout", address, [Service(servicer, add, name)])
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0.1)


@dataclass
class FakeFleet:
    fleet: Fleet
    routing: RememberedRouting
    started: list[FakeEngine] = field(default_factory=list)

    def fake(self, number: int) -> FakeEngine:
        process = self.fleet.engines[number].process
        assert isinstance(process, FakeEngine)
        return process

    async def name_weights(self, number: int, policy_version: int) -> None:
        """As a committed publication does."""
        engine, weights = self.fleet.engines[number], self.fleet.weights
        engine.weights_name = weights.new_name(policy_version, engine.engine_id)
        weights.accept([engine.weights_name])
        before, engine.state = engine.state, EngineState.UPDATING  # the fleet would miss the name it knows
        await engine.client.name_weights(engine.weights_name)
        engine.state = before

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # what is waited for is another party's state
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def fake_fleet(
    count: int = 2, *, token_seconds: float = 0.001, max_restarts: int = 1000
) -> AsyncIterator[FakeFleet]:
    started: list[FakeEngine] = []
    routing = RememberedRouting()

    def build(number: int) -> FakeEngine:
        started.append(FakeEngine(WIRE, token_seconds=token_seconds))
        return started[-1]

    timing = FleetTiming(
        start_seconds=60,
        check_interval_seconds=0.02,
        check_timeout_seconds=1.0,
        missed_checks=3,
        max_restarts=max_restarts,
    )
    fleet = Fleet(count, 1, build, routing, timing)
    await fleet.start()
    try:
        yield FakeFleet(fleet, routing, started)
    finally:
        await fleet.stop()
