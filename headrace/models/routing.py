"""The routing of DeepSeek V3 and GLM-4.5: sigmoid scores, a router bias, shared experts, groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Experts


def read_sigmoid_experts(raw: Mapping[str, Any]) -> Experts:
    """Reads the experts from a config.json. Raises ConfigError for routing that Megatron-core does not support."""
    topk, groups, per_token = raw["num_experts_per_tok"], raw.get("n_group") or 1, raw.get("topk_group") or 1
    if not raw.get("norm_topk_prob", True):
        raise ConfigError("norm_topk_prob false with sigmoid scores is not what Megatron-core computes")
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        raise ConfigError(f"scoring_func {raw['scoring_func']!r} is not supported; supported: 'sigmoid'")
    if raw.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq {raw['moe_layer_freq']} is not supported; supported: 1")
    if groups > 1 and topk // per_token != 2:
        raise ConfigError(
            f"num_experts_per_tok {topk} over topk_group {per_token}: the checkpoint ranks groups by their two best "
            f"experts, Megatron-core by their {topk // per_token} best"
        )
    width = raw["moe_intermediate_size"]
    return Experts(
        count=raw["n_routed_experts"],
        ffn_hidden_size=width,
        topk=topk,
        dense_layers=tuple(range(min(raw["first_k_dense_replace"], raw["num_hidden_layers"]))),
        shared_ffn_hidden_size=width * raw["n_shared_experts"] if raw.get("n_shared_experts") else None,
        score_function="sigmoid",
        normalized=True,
        scaling_factor=float(raw["routed_scaling_factor"]),
        has_router_bias=True,
        num_groups=groups if groups > 1 else None,
        groups_per_token=per_token if groups > 1 else None,
    )
