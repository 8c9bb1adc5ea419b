"""Flags of generation act: on what engines are asked with, and on the parts that the service is built of."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.job import Job
from services.rollout.custom import custom_args
from services.rollout.router import command
from services.rollout.sampling import job_params


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
    assert getattr(job_params(job_of(**{flag: value})), name) == value
    assert getattr(job_params(job_of()), name) != value


def test_max_turns_reaches_the_custom_generate_function() -> None:
    assert custom_args(job_of(max_turns=3), "http://127.0.0.1:1").max_turns == 3


@pytest.mark.parametrize("policy", ["random", "round_robin", "cache_aware"])
def test_the_router_is_started_with_router_policy_and_outlasts_generate_timeout_seconds(policy: str) -> None:
    job = job_of(router_policy=policy, generate_timeout_seconds=90.0)
    words = command(job.rollout.router_policy, 1, 2, job.rollout.generate_timeout_seconds)
    assert words[words.index("--policy") + 1] == policy
    assert words[words.index("--request-timeout-secs") + 1] == "91"
