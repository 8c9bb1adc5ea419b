"""A real SGLang engine with --sglang-enable-priority-scheduling, behind the real router: evaluations come last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from headrace.job.schema.job import Job
from services.rollout.build import sglang_factory
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.machine import has_accelerator
from services.rollout.engine.routing.router import Router
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

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

    async def until(self, count: str, number: int) -> None:
        async with asyncio.timeout(120), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{self.url}/v1/loads") as reply:
                    (load,) = (await reply.json())["loads"]
                if load[count] == number:
                    return
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
async def one_place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OnePlace]:
    folder: Path = tmp_path_factory.mktemp("priority")
    job = Job.model_validate({"model": {"hf_checkpoint": make_tiny_qwen3(folder / "model")}, "sglang": SGLANG})
    timing = FleetTiming(start_seconds=600, check_interval_seconds=0.5)
    router = Router("round_robin", folder / "router.log", request_seconds=240, timing=timing)
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    fleet = Fleet(1, 1, factory, router, timing)
    await asyncio.gather(router.start(), fleet.start())
    client = EngineClient(router.url)
    yield OnePlace(fleet.engines[0].client.url, client)
    await client.close()
    await asyncio.gather(fleet.stop(), router.stop())


async def test_requests_of_training_overtake_those_of_an_evaluation_that_came_before_them(one_place: OnePlace) -> None:
    done: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one_place.ask("holds the place", 1500, None, done))
        await one_place.until("num_running_reqs", 1)
        for number in range(3):
            tasks.create_task(one_place.ask(f"evaluation {number}", 4, evaluation_priority(SGLANG), done))
        await one_place.until("num_waiting_reqs", 3)
        for number in range(3):
            tasks.create_task(one_place.ask(f"training {number}", 4, None, done))
    kinds = [name.split()[0] for name in done]
    assert kinds == ["holds", *["training"] * 3, *["evaluation"] * 3]
