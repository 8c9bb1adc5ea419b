"""Experts in config.json: with sigmoid scores, as DeepSeek V3 and GLM-4.5 have them, and with softmax, as Qwen has."""

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
        dense_layers=_dense_layers(raw),
        shared_ffn_hidden_size=width * raw["n_shared_experts"] if raw.get("n_shared_experts") else None,
        score_function="sigmoid",
        normalized=True,
        scaling_factor=float(raw["routed_scaling_factor"]),
        has_shared_gate=False,
        has_router_bias=True,
        num_groups=groups if groups > 1 else None,
        groups_per_token=per_token if groups > 1 else None,
    )


def _dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The first few; transformers 5 writes the kind of each layer."""
    if kinds := raw.get("mlp_layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(min(raw["first_k_dense_replace"], raw["num_hidden_layers"])))


def read_softmax_experts(raw: Mapping[str, Any]) -> Experts:
    """Reads the experts of Qwen2-MoE and Qwen3-MoE from a config.json: softmax scores, at most one shared expert."""
    return Experts(
        # transformers 5 renamed it when it writes a config
        count=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        topk=raw["num_experts_per_tok"],
        dense_layers=_layers_between(raw),
        shared_ffn_hidden_size=raw.get("shared_expert_intermediate_size"),
        score_function="softmax",
        normalized=bool(raw["norm_topk_prob"]),
        scaling_factor=None,
        has_shared_gate=raw.get("shared_expert_intermediate_size") is not None,
        has_router_bias=False,
        num_groups=None,
        groups_per_token=None,
    )


def _layers_between(raw: Mapping[str, Any]) -> tuple[int, ...]:
    only, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step") or 1
    return tuple(n for n in range(raw["num_hidden_layers"]) if n in only or (n + 1) % step)
