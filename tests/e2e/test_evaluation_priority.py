"""A real SGLang engine with --sglang-enable-priority-scheduling, behind the real router: evaluations come last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from headrace.job.schema.job import Job
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import evaluation_priority, has_accelerator
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.router import Router
from services.rollout.fleet_build import sglang_factory
from tests.long_forms import whole_run
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [whole_run, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SGLANG = {"enable_priority_scheduling": True, "max_running_requests": 1}


@dataclass(frozen=True)
class OnePlace:
    """An engine that runs one request at a time."""

    url: str
    router: EngineClient

    async def ask(self, name: str, tokens: int, priority: int | None, done: list[str]) -> None:
        params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
        prompt = [1, 45, 67, sum(name.encode()) % 256]
        await self.router.generate(prompt, params, request_id=name, cache_key="", seconds=240, priority=priority)
        done.append(name)

    async def load(self, count: str) -> int:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/v1/loads") as reply:
            (load,) = (await reply.json())["loads"]
            return int(load[count])

    async def until(self, count: str, number: int, done: list[str]) -> bool:
        """False when a request has ended before."""
        async with asyncio.timeout(120):
            while await self.load(count) != number:
                if done:
                    return False
                await asyncio.sleep(0.02)
        return not done

    async def order(self, attempt: int) -> list[str]:
        """The kinds of requests as they ended; an empty list if not all have waited for the first one together."""
        done: list[str] = []
        together = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ask(f"holds the place {attempt}", 1500, None, done))
            await self.until("num_running_reqs", 1, done)
            for number in range(3):
                name = f"evaluation {attempt} {number}"
                tasks.create_task(self.ask(name, 32, evaluation_priority(SGLANG), done))
            if await self.until("num_waiting_reqs", 3, done):
                for number in range(3):
                    tasks.create_task(self.ask(f"training {attempt} {number}", 32, None, done))
                together = await self.until("num_waiting_reqs", 6, done)
        return [name.split()[0] for name in done] if together else []


@pytest.fixture(scope="module")
async def one_place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OnePlace]:
    folder: Path = tmp_path_factory.mktemp("priority")
    job = Job.model_validate({"model": {"hf_checkpoint": make_tiny_qwen3(folder / "model")}, "sglang": SGLANG})
    timing = FleetTiming(start_seconds=600, check_interval_seconds=0.5)
    router = Router(job.rollout, folder / "router.log", request_seconds=240, timing=timing)
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    fleet = Fleet(1, 1, factory, router, timing)
    await asyncio.gather(router.start(), fleet.start())
    client = EngineClient(router.url)
    yield OnePlace(fleet.engines[0].client.url, client)
    await client.close()
    await asyncio.gather(fleet.stop(), router.stop())


async def test_requests_of_training_overtake_those_of_an_evaluation_that_came_before_them(one_place: OnePlace) -> None:
    """Without priorities the evaluation's end first in every attempt; beside other work this process reads late."""
    expected = ["holds", *["training"] * 3, *["evaluation"] * 3]
    orders = []
    for attempt in range(8):
        orders.append(await one_place.order(attempt))
        if orders[-1] == expected:
            return
    pytest.fail(f"the orders in which requests ended: {orders}")
