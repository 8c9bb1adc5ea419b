"""What data ranks are balanced by, and what a forward and backward pass costs."""

from __future__ import annotations

from pathlib import Path

from headrace.job.schema.training import TrainSection
from headrace.models.registry import read_architecture
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import ModelFlops, cost_of
from tests.support.models.tiny_families import make_tiny


def test_data_ranks_are_balanced_by_tokens_of_prompt_and_response() -> None:
    cost = cost_of(TrainSection())
    assert cost is not None
    assert cost(SampleFacts("s", "g", "s", 1.0, "completed", 3, 4, 4, 0)) == 7
    assert cost_of(TrainSection(balance_data=False)) is None


def test_flops_count_attention_so_one_long_sample_costs_more_than_two_of_half_its_length(tmp_path: Path) -> None:
    flops = ModelFlops.of(read_architecture(make_tiny(tmp_path / "qwen3", "qwen3", tied=True)))
    assert flops.training([(2000, 1000)]) > 2.2 * flops.training([(1000, 500)])
