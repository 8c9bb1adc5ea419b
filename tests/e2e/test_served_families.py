"""Each tiny family is served by a real SGLang engine on a CPU with the log-probs of transformers.

An engine takes half a minute to start: `HEADRACE_SERVED_FAMILIES=all`, or names with commas between them, runs it
(`make chaos` does). docs/models.md has the table that it prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import HeadraceError
from headrace.job.schema.job import Job
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import SglangProcess
from services.rollout.fleet_build import engine_options
from tests.support.engine_stack import hugging_face_log_probs
from tests.support.models.tiny_families import EXPERTS_OF_ENGINES, LATENTS_OF_ENGINES, make_tiny
from tests.support.ranks.rank_results import network

ASKED = os.environ.get("HEADRACE_SERVED_FAMILIES", "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ASKED, reason="HEADRACE_SERVED_FAMILIES=all runs it"),
]

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama3_2": {"tied": True},
    "mistral": {},
    "smollm3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": EXPERTS_OF_ENGINES | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS_OF_ENGINES,
    "glm4": {},
    "glm4_32b": {},
    "glm4_moe": EXPERTS_OF_ENGINES,
    "glm4_moe_lite": LATENTS_OF_ENGINES,
    "deepseek_v3": LATENTS_OF_ENGINES,
    "moonlight": LATENTS_OF_ENGINES | {"rms_norm_eps": 1e-6},  # SGLang takes it for the norms of latents, too
    "kimi_k2": LATENTS_OF_ENGINES,
    "olmo3": {},
    "minimax_m2": {"intermediate_size": 64},  # of an expert
    "gemma3_text": {"tied": True},
    "gemma3": {},
}
BOUND = 1e-4


@pytest.mark.parametrize("family", [name for name in SHAPES if ASKED == "all" or name in ASKED.split(",")])
async def test_a_family_is_served_with_the_log_probs_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = make_tiny(tmp_path / "model", family, **SHAPES[family])
    options = engine_options(Job.model_validate({"model": {"hf_checkpoint": checkpoint}}))
    engine = SglangProcess(options, 0, tmp_path / "engine.log", has_accelerator=await has_accelerator())
    try:
        await engine.start(seconds=600)
        async with EngineClient(engine.url) as client:
            found = [await _differences(client, checkpoint, first) for first in range(4)]
    except HeadraceError as error:
        pytest.fail(f"{family} is not served: {error.message}\n{engine.last_lines()}")
    finally:
        await engine.stop()
    print(f"{family}: largest difference of a token's log-prob {max(map(max, found)):.1e}")
    assert max(map(max, found)) < BOUND


async def _differences(client: EngineClient, checkpoint: Path, first: int) -> Sequence[float]:
    prompt, params = list(range(first, first + 9)), SamplingParams(max_new_tokens=24)
    response = await client.generate(prompt, params, request_id=f"served-{first}", cache_key="0", seconds=120)
    expected = hugging_face_log_probs(network(checkpoint).float(), prompt, response.tokens)
    return (torch.tensor(response.log_probs) - expected).abs().tolist()
