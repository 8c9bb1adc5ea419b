"""Prompts are shared where that is exact, and refused where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.errors import ConfigError
from services.trainer.hugging_face.rank_model import choose_packing
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


def test_prompts_are_shared_unless_the_job_says_otherwise(on_cpu: Layout) -> None:
    assert choose_packing(None, config(), on_cpu) == "shared_prompts"
    assert choose_packing(None, config(**EXPERTS, moe_aux_loss_coeff=0.0), on_cpu) == "shared_prompts"


@pytest.mark.parametrize("what", COUNTING)
def test_a_loss_that_counts_tokens_keeps_every_prompt(on_cpu: Layout, what: str) -> None:
    counting = config(**EXPERTS, **COUNTING[what])
    assert choose_packing(None, counting, on_cpu) == "packed"
    with pytest.raises(ConfigError, match=f"but {what} would count it once for .*pass --packing packed"):
        choose_packing("shared_prompts", counting, on_cpu)
