"""Warnings about what command lines written for slime give all the same."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.job.megatron.arguments import megatron
from headrace.job.schema.job import Job


def sequence_parallel_alone(job: Job) -> Sequence[str]:
    """It shares activations over tensor ranks, of which there is one."""
    args = megatron(job)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        return ["sequence_parallel has no effect with tensor_model_parallel_size 1: it is off"]
    return []


def begins_anew(job: Job) -> Sequence[str]:
    """A folder to resume from that is not there yet is a run that begins."""
    folder = job.checkpoint.load
    if folder is not None and not folder.exists():
        return [f"load {folder} is not there yet: training starts from the beginning, with hf_checkpoint's weights"]
    return []
