"""Warns about flags that command lines written for slime often contain."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.job.megatron.arguments import megatron
from headrace.job.schema.job import Job


def sequence_parallel_alone(job: Job) -> Sequence[str]:
    """Warns that sequence parallelism needs more than one tensor rank."""
    args = megatron(job.megatron)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        return ["sequence_parallel has no effect with tensor_model_parallel_size 1 and is turned off"]
    return []


def evaluates_nothing(job: Job) -> Sequence[str]:
    """Warns that an interval of evaluations needs something to evaluate."""
    if job.eval.eval_interval is not None and not job.eval.is_asked_for:
        return [f"eval_interval {job.eval.eval_interval} has no effect without eval_prompt_data: nothing is evaluated"]
    return []


def begins_anew(job: Job) -> Sequence[str]:
    """Warns that a missing folder to resume from starts a new run."""
    folder = job.checkpoint.load
    if folder is not None and not folder.exists():
        return [f"load {folder} does not exist yet: training starts from the beginning, with hf_checkpoint's weights"]
    return []
