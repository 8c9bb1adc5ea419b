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


def begins_anew(job: Job) -> Sequence[str]:
    """Warns that a missing folder to resume from starts a new run."""
    folder = job.checkpoint.load
    if folder is not None and not folder.exists():
        return [f"load {folder} does not exist yet: training starts from the beginning, with hf_checkpoint's weights"]
    return []
