"""Engines behind the real sglang-router share the samples of a step evenly, and one of them computes a prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.errors import Unavailable
from headrace.hooks.kit.engine import ask_engine
from headrace.job.schema.job import Job
from headrace.rpc.net import routed_by
from services.rollout.build import samples_together
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from tests.support.routed_step import routed_step


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


@pytest.mark.parametrize(
    ("shape", "together"),
    [
        ({"engines": 4}, 4),
        ({"engines": 4, "prompts": 32}, 8),
        ({"engines": 2, "services": 2}, 4),
        ({"engines": 64}, 1),
        ({"samples": 1}, 1),
    ],
)
def test_a_prompts_samples_stay_together_where_every_engine_has_four_such_parts(
    shape: dict[str, Any], together: int
) -> None:
    job = job_of(**shape)
    num_engines = job.services.num_rollout_services * job.placement.num_engines
    assert samples_together(job.rollout, num_engines) == together


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
