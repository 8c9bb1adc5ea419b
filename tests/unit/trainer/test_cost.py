"""What data ranks are balanced by: tokens, or the multiplications of a forward pass counted on the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from headrace.config.architecture import Architecture
from headrace.config.job import Job
from services.trainer.batch import SampleFacts
from services.trainer.cost import cost_of
from services.trainer.planning import Cost
from tests.support.tiny_families import VOCAB_SIZE, make_tiny


def facts(prompt: int, response: int) -> SampleFacts:
    return SampleFacts("s", "g", "s", 1.0, "completed", prompt, response, response, 0)


def cost(folder: Path, **train: object) -> Cost | None:
    job = Job.model_validate({"model": {"hf_checkpoint": folder}, "train": train})
    return cost_of(job, Architecture.read(folder))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cost") / "qwen3", "qwen3", tied=True)


def test_tokens_are_prompt_and_response(tiny: Path) -> None:
    by_tokens = cost(tiny)
    assert by_tokens is not None
    assert by_tokens(facts(3, 4)) == 7


def test_nothing_is_balanced_when_the_job_says_so(tiny: Path) -> None:
    assert cost(tiny, balance_data=False) is None


@pytest.mark.parametrize("length", [16, 1024])
def test_flops_are_those_of_the_layers(tiny: Path, length: int) -> None:
    by_flops = cost(tiny, balance_by="flops")
    assert by_flops is not None
    network = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.model(torch.randint(0, VOCAB_SIZE, (1, length)))
    # A multiplication and an addition each; transformers also computes the half that a causal mask hides.
    width = network.config.num_attention_heads * network.config.head_dim
    masked = 2 * network.config.num_hidden_layers * width * length * length
    assert 2 * by_flops(facts(length, 0)) == pytest.approx(counter.get_total_flops() - masked, rel=0.02)
