"""Builds the request for an evaluation's data set, for the trainer and `headrace eval`."""

from __future__ import annotations

from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection


def eval_dataset(
    evaluation: EvalSection,
    rollout: RolloutSection,
    data: DataSection,
    name: str,
    path: Path,
    max_prompts: int | None = None,
) -> rollout_pb2.EvalDataset:
    """The rows of `path`, sampled as the [eval] section says, and where it says nothing as in training."""
    return rollout_pb2.EvalDataset(
        name=name,
        path=str(path),
        n_samples_per_prompt=evaluation.n_samples_per_eval_prompt,
        sampling=sample_pb2.SamplingParams(
            temperature=_temperature(evaluation, rollout),
            top_p=evaluation.eval_top_p,
            top_k=evaluation.eval_top_k,
            max_new_tokens=evaluation.eval_max_response_len or rollout.rollout_max_response_len,
            stop=rollout.rollout_stop,
            stop_token_ids=rollout.rollout_stop_token_ids,
        ),
        max_prompts=max_prompts,
        input_key=data.input_key,
        label_key=data.label_key or "",
        metadata_key=data.metadata_key or "",
        pass_reward=evaluation.eval_pass_reward,
    )


def _temperature(evaluation: EvalSection, rollout: RolloutSection) -> float:
    """Greedy, unless the job asks for what sampling alone gives: several responses to a prompt, or a nucleus."""
    if evaluation.eval_temperature is not None:
        return evaluation.eval_temperature
    samples = evaluation.n_samples_per_eval_prompt > 1 or evaluation.eval_top_p is not None
    return rollout.rollout_temperature if samples else 0.0
