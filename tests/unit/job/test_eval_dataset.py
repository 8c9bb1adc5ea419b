"""Every --eval-* flag reaches the evaluation that rollout is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.job.eval_sets import EvalSet, eval_dataset
from headrace.job.schema.job import Job
from services.rollout.production.sampling import job_params, merged_params


def job_of(rollout: Mapping[str, object], **evaluation: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "rollout": rollout, "eval": evaluation})


AIME = EvalSet(name="aime", path=Path("/data/aime.jsonl"))
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
        ({"eval_top_k": 1}, "top_k", 1),
        ({"eval_max_response_len": 512}, "max_new_tokens", 512),
        ({"eval_min_new_tokens": 8}, "min_new_tokens", 8),
    ],
)
def test_an_evaluation_is_sampled_as_the_job_says(flags: dict[str, Any], name: str, expected: float) -> None:
    job = job_of(TRAINED, **flags)
    sampled = merged_params(eval_dataset(AIME, job.eval, job.rollout, job.data).sampling, job_params(job.rollout))
    assert getattr(sampled, name) == expected


def test_an_evaluation_has_its_data_its_samples_and_the_stops_of_training() -> None:
    job = job_of({"rollout_stop": ["</answer>"], "rollout_stop_token_ids": [7]}, n_samples_per_eval_prompt=16)
    asked = eval_dataset(AIME, job.eval, job.rollout, job.data, 3)
    assert (asked.name, asked.path, asked.n_samples_per_prompt, asked.max_prompts) == (
        "aime",
        "/data/aime.jsonl",
        16,
        3,
    )
    assert (list(asked.sampling.stop), list(asked.sampling.stop_token_ids)) == (["</answer>"], [7])


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ({"eval_input_key": "question"}, "input_key", "question"),
        ({"eval_label_key": "answer"}, "label_key", "answer"),
        ({}, "label_key", "gold"),
        ({"eval_tool_key": "functions"}, "tool_key", "functions"),
        ({"eval_max_prompt_len": 9}, "max_prompt_tokens", 9),
        ({"eval_max_context_len": 99}, "max_context_tokens", 99),
    ],
)
def test_keys_and_lengths_of_evaluations_are_the_flags_else_trainings(
    flags: dict[str, Any], name: str, expected: object
) -> None:
    lengths = {"rollout_max_context_len": 128, "rollout_max_response_len": 64}
    keys = {"input_key": "text", "label_key": "gold", "tool_key": "tools"}
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": "m"},
            "data": keys,
            "rollout": lengths,
            "eval": flags,
        }
    )
    assert getattr(eval_dataset(AIME, job.eval, job.rollout, job.data), name) == expected
