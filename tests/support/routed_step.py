"""A step's samples, all at once, through the real sampler and the real sglang-router, to engines without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.job.schema.job import Job
from services.rollout.build import samples_together
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.router import Router
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import EngineSampler, SampleRequest
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.tiny_model import make_tiny_qwen3

_ALIKE = tuple(range(3, 203))
"""A template and its instructions, with which every prompt begins."""
_OWN_TOKENS = 40
_TIMING = FleetTiming(start_seconds=240)


@dataclass(frozen=True)
class RoutedStep:
    """Sample ids of one step, by engine."""

    sample_ids: Sequence[Sequence[str]]

    def shares(self) -> list[float]:
        """Each engine's part of the samples."""
        total = sum(map(len, self.sample_ids))
        return [len(of_one) / total for of_one in self.sample_ids]

    def engines_of_a_prompt(self) -> float:
        """The mean number of engines that compute the same prompt; 1 is the least."""
        prompts = [{name.partition("/")[0] for name in of_one} for of_one in self.sample_ids]
        return sum(map(len, prompts)) / len(set().union(*prompts))


async def routed_step(job: Job, folder: Path, token_seconds: float = 0.01) -> RoutedStep:
    """Starts as many engines as the job says, and one router before them."""
    make_tiny_qwen3(folder / "model")
    router = Router(job.rollout, folder / "router.log", request_seconds=240, timing=_TIMING)
    fleet = Fleet(
        job.placement.num_engines, 1, lambda _: FakeEngine(WIRE, token_seconds=token_seconds), router, _TIMING
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.stop)
        stack.push_async_callback(fleet.stop)
        await asyncio.gather(router.start(), fleet.start())
        client = await stack.enter_async_context(EngineClient(router.url))
        sampler = EngineSampler(
            Generator(client, fleet.weights),
            PromptEncoder(folder / "model", apply_chat_template=False),
            seconds=240,
            samples_together=samples_together(job.rollout, job.placement.num_engines),
        )
        requests = [
            SampleRequest(f"g{group}/{index}", f"g{group}", index, _prompt(group), None, {}, _params(group, index))
            for group in range(job.rollout.groups_per_step)
            for index in range(job.rollout.samples_per_group)
        ]
        await sampler.sample_all(requests, evaluation=False)
        engines = [engine.process for engine in fleet.engines]
        return RoutedStep([_asked(engine) for engine in engines if isinstance(engine, FakeEngine)])


def _prompt(group: int) -> EncodedPrompt:
    return EncodedPrompt("", (*_ALIKE, *(3 + (7 * group + k) % 250 for k in range(_OWN_TOKENS))))


def _params(group: int, index: int) -> SamplingParams:
    """Responses of 8 to 23 tokens."""
    return SamplingParams(max_new_tokens=8 + (5 * group + 11 * index) % 16)


def _asked(engine: FakeEngine) -> list[str]:
    """An attempt's number is behind the sample's id; the fleet asks by itself, too."""
    return [body["rid"].partition("#")[0] for body in engine.bodies if body.get("rid", "").startswith("g")]
