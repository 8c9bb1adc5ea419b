"""Flags of generation act: on what engines are asked with, and on the parts that the service is built of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Status
from services.rollout.build import rollout_service
from services.rollout.engine.router import command
from services.rollout.production.hooks import custom_args
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest, job_params
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.tiny_model import make_tiny_qwen3

HOOK = """
async def generate(args, sample, sampling_params):
    sample.tokens = [1, 2, 3, 4]
    sample.response, sample.response_length = "from the user's function", 2
    sample.rollout_log_probs = [-0.5, -0.25]
    sample.status = sample.Status.COMPLETED
    return sample
"""


def job_of(**rollout: Any) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "rollout": rollout})


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("rollout_temperature", 0.7, "temperature"),
        ("rollout_top_p", 0.9, "top_p"),
        ("rollout_top_k", 20, "top_k"),
        ("rollout_max_response_len", 99, "max_new_tokens"),
        ("rollout_stop", ("</s>",), "stop"),
        ("rollout_stop_token_ids", (5, 6), "stop_token_ids"),
    ],
)
def test_engines_are_asked_as_the_job_says(flag: str, value: object, name: str) -> None:
    assert getattr(job_params(job_of(**{flag: value}).rollout), name) == value
    assert getattr(job_params(job_of().rollout), name) != value


def test_max_turns_reaches_the_custom_generate_function() -> None:
    assert custom_args(hook_args(job_of(max_turns=3)), "http://127.0.0.1:1").max_turns == 3


@pytest.mark.parametrize("policy", ["manual", "random", "round_robin", "cache_aware"])
def test_the_router_is_started_with_router_policy_and_outlasts_generate_timeout_seconds(policy: str) -> None:
    job = job_of(router_policy=policy, generate_timeout_seconds=90.0)
    words = command(job.rollout, 1, 2, job.rollout.generate_timeout_seconds)
    assert words[words.index("--policy") + 1] == policy
    assert words[words.index("--request-timeout-secs") + 1] == "91"


@pytest.mark.parametrize(
    ("word", "value"), [("--cache-threshold", 0.3), ("--balance-abs-threshold", 8), ("--balance-rel-threshold", 1.1)]
)
def test_thresholds_of_cache_aware_reach_the_router_and_no_other_policy(word: str, value: float) -> None:
    words = command(job_of(router_policy="cache_aware").rollout, 1, 2, 90.0)
    assert words[words.index(word) + 1] == str(value)
    assert word not in command(job_of().rollout, 1, 2, 90.0)


async def test_custom_generate_function_path_makes_the_samples_of_the_service(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    make_tiny_qwen3(tmp_path / "model")
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": tmp_path / "model"},
            "rollout": {"custom_generate_function_path": f"{tmp_path / 'hook.py'}:generate"},
            "services": {"buffer_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
            "placement": {"rollout_num_gpus": 1},
        }
    )
    service = rollout_service(job, lambda number: FakeEngine(WIRE), tmp_path, CollectorRegistry())
    request = SampleRequest("g/1/0", "g", 0, EncodedPrompt("hello", (1, 2)), "7", {}, job_params(job.rollout))
    try:
        (sample,) = await service.parts.sampler.sample_all([request], evaluation=False)
    finally:
        await service.stop()
    assert (sample.status, sample.response) == (Status.COMPLETED, "from the user's function")
    (warning,) = service.parts.warnings
    assert "weight_versions" in warning
