"""The real sglang-router before fake engines: it is killed and hangs, engines live on, and it shares a step evenly."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.errors import Unavailable
from headrace.hooks.kit.engine import ask_engine
from headrace.job.schema.job import Job
from headrace.job.schema.production import RolloutSection
from headrace.rpc.net import routed_by
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.replies import Finish
from services.rollout.engine.router import Router
from services.rollout.production.generator import Generator
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import WIRE
from tests.support.routed_step import routed_step

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


async def test_a_router_that_divides_requests_gives_each_to_an_engine_of_either_kind(tmp_path: Path) -> None:
    timing = FleetTiming(start_seconds=60)
    router = Router(ROLLOUT, tmp_path / "router.log", request_seconds=240, timing=timing, divides_requests=True)
    parts = ("prefill", "prefill", "decode")
    fleet = Fleet(3, 1, lambda number: FakeEngine(WIRE, part=parts[number]), router, timing)
    await asyncio.gather(router.start(), fleet.start())
    client = EngineClient(router.url)
    generator = Generator(client, fleet.weights, fleet.suspect)
    for number in range(4):
        params = SamplingParams(max_new_tokens=8)
        answer = await generator.generate(PROMPT, params, request_id=f"r{number}", seconds=60)
        assert list(answer.tokens) == response_to(PROMPT, 8)
    first, second, decode = (e.process.bodies for e in fleet.engines if isinstance(e.process, FakeEngine))
    rooms = {body["bootstrap_room"]: body["bootstrap_port"] for body in (*first, *second)}
    assert rooms == dict.fromkeys((body["bootstrap_room"] for body in decode), 8998)
    assert (len(first), len(second), len(rooms)) == (2, 2, 4)
    await client.close()
    await asyncio.gather(fleet.stop(), router.stop())


def job_of(*, prompts: int = 8, samples: int = 8, engines: int = 2, services: int = 1) -> Job:
    return Job.model_validate(
        {
            "model": {"hf_checkpoint": "m"},
            "rollout": {"rollout_batch_size": prompts, "n_samples_per_prompt": samples},
            "placement": {"rollout_num_gpus": engines},
            "services": {"rollout_services": services},
        }
    )


async def test_two_engines_share_a_step_of_8_prompts_that_begin_alike(tmp_path: Path) -> None:
    """The default, router_policy manual."""
    step = await routed_step(job_of(), tmp_path)
    assert 0.4 <= max(step.shares()) <= 0.6
    assert step.engines_of_a_prompt() == 1.0


async def test_every_request_for_a_response_has_its_key_in_a_header_that_says_nothing_else() -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("X-SMG-Routing-Key"))
        return web.json_response({}, status=503)

    app = web.Application()
    app.add_routes([web.post("/generate", answer)])
    async with TestServer(app) as server, EngineClient(str(server.make_url("")).rstrip("/")) as client:
        asked: dict[str, Any] = {"request_id": "r", "cache_key": "0", "seconds": 60.0}
        for key in ("a key\nof any text", None):
            with pytest.raises(Unavailable):
                await client.generate([1], SamplingParams(8), routing_key=key, **asked)
            with pytest.raises(Unavailable):
                await anext(client.stream([1], SamplingParams(8), routing_key=key, **asked))
        with pytest.raises(Unavailable):
            await ask_engine(f"{client.url}/generate", [1], {}, seconds=0.05, routing_key="a key\nof any text")
    digest = routed_by("a key\nof any text")["X-SMG-Routing-Key"]
    assert re.fullmatch("[0-9a-f]{32}", digest)
    assert seen[:4] == [digest, digest, None, None]
    assert set(seen[4:]) == {digest}
