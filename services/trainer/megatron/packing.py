"""The choice of how samples are packed into rows."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from headrace.errors import ConfigError
from services.trainer.megatron.gpt.layer_specs import has_transformer_engine
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.rows import Packing


def choose_packing(asked: Packing | None, config: TransformerConfig, layout: Layout) -> Packing:
    """The job's choice; else `shared_prompts`, where that is exact and attention is as fast.

    Raises ConfigError when prompts are to be shared and the model's loss would not be the same.
    """
    obstacle = _counts_tokens(config)
    if asked == "shared_prompts" and obstacle:
        raise ConfigError(
            f"packing shared_prompts trains a prompt once for all its responses, but {obstacle} would count it once "
            "for each of them: pass --packing packed",
            field="packing",
        )
    if asked is not None:
        return asked
    return "packed" if obstacle or has_transformer_engine(layout) else "shared_prompts"


def _counts_tokens(config: TransformerConfig) -> str | None:
    """Names a part of the loss that depends on the number of tokens, and not only on what each of them sees."""
    if config.num_moe_experts is None:
        return None
    balancing = config.moe_router_load_balancing_type
    if config.moe_aux_loss_coeff and balancing not in ("none", ["none"]):
        return f"the experts' {balancing}"
    if config.moe_z_loss_coeff:
        return "the experts' z-loss"
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        return "the update of the router biases"
    if config.moe_expert_capacity_factor is not None:
        return "the experts' capacity"
    return None
