"""Prompts are shared where that is exact, and refused where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from services.trainer.megatron.packing import packing_of
from services.trainer.megatron.parallel import Layout

EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
COUNTING: dict[str, dict[str, Any]] = {
    "the experts' aux_loss": {"moe_aux_loss_coeff": 0.01},
    "the experts' z-loss": {"moe_z_loss_coeff": 0.001},
    "the experts' capacity": {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "none"},
}


@pytest.fixture
def on_cpu() -> Layout:
    class OnCpu(Layout):
        def __init__(self) -> None:
            object.__setattr__(self, "device", torch.device("cpu"))

    return OnCpu()


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **changes)


def job(packing: str | None = None) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "model"}, "train": {"packing": packing}})


def test_prompts_are_shared_unless_the_job_says_otherwise(on_cpu: Layout) -> None:
    assert packing_of(job(), config(), on_cpu) == "shared_prompts"
    assert packing_of(job("padded"), config(), on_cpu) == "padded"
    assert packing_of(job(), config(**EXPERTS, moe_aux_loss_coeff=0.0), on_cpu) == "shared_prompts"


@pytest.mark.parametrize("what", COUNTING)
def test_a_loss_that_counts_tokens_keeps_every_prompt(on_cpu: Layout, what: str) -> None:
    counting = config(**EXPERTS, **COUNTING[what])
    assert packing_of(job(), counting, on_cpu) == "packed"
    with pytest.raises(ConfigError, match=f"and {what} counts it .*pass --packing packed"):
        packing_of(job("shared_prompts"), counting, on_cpu)
