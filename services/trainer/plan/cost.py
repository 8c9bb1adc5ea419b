"""What a sample costs to train: the measure by which data ranks are balanced."""

from __future__ import annotations

from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.flops import ModelFlops
from services.trainer.plan.planning import Cost


def cost_of(job: Job, architecture: Architecture) -> Cost | None:
    """By tokens or by FLOPs, as the job says; None when it does not balance."""
    if not job.train.balance_data:
        return None
    if job.train.balance_by == "tokens":
        return _tokens
    flops = ModelFlops.of(architecture)
    return lambda sample: flops.training([(_tokens(sample), sample.response_length)])


def _tokens(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length
