"""The real sglang-router before fake engines: it is killed, stopped and blocked, and engines outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.errors import Unavailable
from headrace.job.schema.production import RolloutSection
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.replies import Finish
from services.rollout.engine.router import Router
from services.rollout.production.generator import Generator
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import WIRE

ROLLOUT = RolloutSection(router_policy="round_robin")
PROMPT = (3, 1, 4, 1, 5)


@dataclass
class Routed:
    router: Router
    fleet: Fleet
    generator: Generator
    kept: asyncio.Task[None]

    def fakes(self) -> list[FakeEngine]:
        return [engine.process for engine in self.fleet.engines if isinstance(engine.process, FakeEngine)]

    async def ask(self, name: str, tokens: int = 8) -> list[int]:
        params = SamplingParams(max_new_tokens=tokens)
        answer = await self.generator.generate(PROMPT, params, request_id=name, seconds=240)
        assert answer.finish is Finish.LENGTH
        return list(answer.tokens)

    async def until_replaced(self, times: int) -> None:
        async with asyncio.timeout(240):
            while self.router.replaced < times:  # another party's state
                await asyncio.sleep(0.02)


@pytest.fixture
async def routed(tmp_path: Path) -> AsyncIterator[Routed]:
    timing = FleetTiming(start_seconds=60, check_interval_seconds=0.1, check_timeout_seconds=1.0, missed_checks=3)
    router = Router(ROLLOUT, tmp_path / "router.log", request_seconds=240, timing=timing)
    fleet = Fleet(2, 1, lambda number: FakeEngine(WIRE, token_seconds=0.02), router, timing)
    await asyncio.gather(router.start(), fleet.start())
    kept = asyncio.create_task(router.supervise())
    client = EngineClient(router.url)
    yield Routed(router, fleet, Generator(client, fleet.weights, fleet.suspect), kept)
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    await client.close()
    await asyncio.gather(fleet.stop(), router.stop())


async def test_a_router_that_ends_or_hangs_is_replaced_while_requests_go_on_and_engines_live(routed: Routed) -> None:
    for times, how in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
        asked = sum(fake.calls.count("/generate") for fake in routed.fakes())
        in_flight = [asyncio.create_task(routed.ask(f"{how.name}-{number}", 100)) for number in range(6)]
        async with asyncio.timeout(60):
            while sum(fake.calls.count("/generate") for fake in routed.fakes()) < asked + 6:  # another party's state
                await asyncio.sleep(0.01)
        before = routed.router.pid
        os.kill(before, how)
        await routed.until_replaced(times)
        assert routed.router.pid != before
        assert await asyncio.gather(*in_flight) == [response_to(PROMPT, 100)] * 6
        assert await routed.ask(f"after {how.name}") == response_to(PROMPT, 8)
    assert [(e.restarts, e.state) for e in routed.fleet.engines] == [(0, EngineState.READY)] * 2


async def test_a_new_router_has_the_engines_that_are_left_and_those_that_came_meanwhile(routed: Routed) -> None:
    one, other = routed.fleet.engines
    os.kill(routed.router.pid, signal.SIGKILL)
    with suppress(Unavailable):  # who is gone cannot be told
        await routed.router.remove(one.url)
    coming = asyncio.create_task(routed.router.add(other.url))
    await routed.until_replaced(1)
    await coming
    assert [worker.url for worker in await routed.router._workers()] == [other.url]
    await routed.router.add(one.url)
    assert {worker.url for worker in await routed.router._workers()} == {one.url, other.url}
