"""The cost of training a sample: the measure by which data ranks are balanced."""

from __future__ import annotations

from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Architecture
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.flops import ModelFlops
from services.trainer.plan.planning import Cost


def cost_of(config: TrainSection, architecture: Architecture) -> Cost | None:
    """A sample's tokens or FLOPs, as the job balances them; None when it does not balance."""
    if not config.balance_data:
        return None
    if config.balance_by == "tokens":
        return _tokens
    flops = ModelFlops.of(architecture)
    return lambda sample: flops.training([(_tokens(sample), sample.response_length)])


def _tokens(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length
