"""Builds the request for an evaluation's data set, for the trainer and `headrace eval`."""

from __future__ import annotations

from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.job.schema.job import Job


def eval_dataset(job: Job, name: str, path: Path, max_prompts: int | None = None) -> rollout_pb2.EvalDataset:
    """The rows of `path`, sampled as the [eval] section says, and where it says nothing as in training."""
    return rollout_pb2.EvalDataset(
        name=name,
        path=str(path),
        n_samples_per_prompt=job.eval.n_samples_per_eval_prompt,
        sampling=sample_pb2.SamplingParams(
            temperature=_temperature(job),
            top_p=job.eval.eval_top_p,
            top_k=job.eval.eval_top_k,
            max_new_tokens=job.eval.eval_max_response_len or job.rollout.rollout_max_response_len,
            stop=job.rollout.rollout_stop,
            stop_token_ids=job.rollout.rollout_stop_token_ids,
        ),
        max_prompts=max_prompts,
        input_key=job.data.input_key,
        label_key=job.data.label_key or "",
        metadata_key=job.data.metadata_key or "",
    )


def _temperature(job: Job) -> float:
    """Greedy, unless the job asks for what sampling alone gives: several responses to a prompt, or a nucleus."""
    if job.eval.eval_temperature is not None:
        return job.eval.eval_temperature
    samples = job.eval.n_samples_per_eval_prompt > 1 or job.eval.eval_top_p is not None
    return job.rollout.rollout_temperature if samples else 0.0
