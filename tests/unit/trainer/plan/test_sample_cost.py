"""What data ranks are balanced by: tokens, or floating-point operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.job.schema.training import TrainSection
from headrace.models.registry import read_architecture
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import Cost, ModelFlops, cost_of
from tests.support.models.tiny_families import make_tiny


def facts(prompt: int, response: int) -> SampleFacts:
    return SampleFacts("s", "g", "s", 1.0, "completed", prompt, response, response, 0)


def cost(folder: Path, **train: object) -> Cost | None:
    return cost_of(TrainSection.model_validate(train), read_architecture(folder))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cost") / "qwen3", "qwen3", tied=True)


def test_tokens_are_prompt_and_response(tiny: Path) -> None:
    by_tokens = cost(tiny)
    assert by_tokens is not None
    assert by_tokens(facts(3, 4)) == 7


def test_nothing_is_balanced_when_the_job_says_so(tiny: Path) -> None:
    assert cost(tiny, balance_data=False) is None


def test_flops_count_attention_so_one_long_sample_costs_more_than_two_of_half_its_length(tiny: Path) -> None:
    by_flops = cost(tiny, balance_by="flops")
    assert by_flops is not None
    assert by_flops(facts(1000, 1000)) > 2.2 * by_flops(facts(500, 500))
    assert by_flops(facts(1000, 1000)) == ModelFlops.of(read_architecture(tiny)).training([(2000, 1000)])
