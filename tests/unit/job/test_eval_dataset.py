"""Every --eval-* flag reaches the evaluation that rollout is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.job.eval_dataset import eval_dataset
from headrace.job.schema.job import Job
from services.rollout.production.sampling import job_params, merged_params


def job_of(rollout: Mapping[str, object], **evaluation: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "rollout": rollout, "eval": evaluation})


TRAINED = {"rollout_temperature": 0.8, "rollout_top_p": 0.9, "rollout_top_k": 50, "rollout_max_response_len": 64}


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ({}, "temperature", 0.0),
        ({"eval_temperature": 0.3}, "temperature", 0.3),
        ({"eval_temperature": 0.0, "n_samples_per_eval_prompt": 4}, "temperature", 0.0),
        ({"n_samples_per_eval_prompt": 4}, "temperature", 0.8),
        ({"eval_top_p": 0.7}, "temperature", 0.8),
        ({"eval_top_p": 0.7}, "top_p", 0.7),
        ({}, "top_p", 0.9),
        ({"eval_top_k": 1}, "top_k", 1),
        ({}, "top_k", 50),
        ({"eval_max_response_len": 512}, "max_new_tokens", 512),
        ({}, "max_new_tokens", 64),
    ],
)
def test_an_evaluation_is_sampled_as_the_job_says(flags: dict[str, Any], name: str, expected: float) -> None:
    job = job_of(TRAINED, **flags)
    sampled = merged_params(
        eval_dataset(job.eval, job.rollout, job.data, "aime", Path("aime.jsonl")).sampling, job_params(job.rollout)
    )
    assert getattr(sampled, name) == expected


def test_an_evaluation_has_its_data_its_samples_and_the_stops_of_training() -> None:
    job = job_of({"rollout_stop": ["</answer>"], "rollout_stop_token_ids": [7]}, n_samples_per_eval_prompt=16)
    asked = eval_dataset(job.eval, job.rollout, job.data, "aime", Path("/data/aime.jsonl"), 3)
    assert (asked.name, asked.path, asked.n_samples_per_prompt, asked.max_prompts) == (
        "aime",
        "/data/aime.jsonl",
        16,
        3,
    )
    assert (list(asked.sampling.stop), list(asked.sampling.stop_token_ids)) == (["</answer>"], [7])


def test_eval_pass_reward_is_what_a_sample_must_have_to_pass() -> None:
    job = job_of({}, eval_pass_reward=0.5)
    assert eval_dataset(job.eval, job.rollout, job.data, "aime", Path("/data/aime.jsonl")).pass_reward == 0.5
