"""Qwen3-Next: three layers of four have a gated delta net, the fourth gated attention; experts, one of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import (
    Architecture,
    LinearAttention,
    read_decoder,
    read_softmax_experts,
    rotary_percent,
)
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset

_EVERY = 4
_ROTATED = 0.25


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_hybrid(raw, is_interleaved=True, experts=read_softmax_experts(raw))


def read_hybrid(raw: Mapping[str, Any], *, is_interleaved: bool, **particular: Any) -> Architecture:
    """What Qwen3.5 has as well."""
    plain = {name: value for name, value in raw.items() if name != "layer_types"}
    return read_decoder(
        plain,
        qk_layernorm=True,
        rotary_percent=rotary_percent(raw, _ROTATED),
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        linear_attention=LinearAttention(
            layers=_linear_layers(raw),
            conv_kernel_dim=raw["linear_conv_kernel_dim"],
            key_head_dim=raw["linear_key_head_dim"],
            value_head_dim=raw["linear_value_head_dim"],
            num_key_heads=raw["linear_num_key_heads"],
            num_value_heads=raw["linear_num_value_heads"],
            is_interleaved=is_interleaved,
        ),
        **{"kept": ("mtp.",)} | particular,
    )


def _linear_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Transformers 5 writes the kind of each layer; else every fourth has attention."""
    if kinds := raw.get("layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    every = raw.get("full_attention_interval") or _EVERY
    return tuple(layer for layer in range(raw["num_hidden_layers"]) if (layer + 1) % every)


_80B = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_LAYOUT = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 16, **SHARED_OPTIMIZER}

FAMILY = Family(
    model_types=("qwen3_next",),
    read=read,
    presets=(Preset("qwen3-next-80B-A3B", _80B, 79.7e9, _LAYOUT),),
)
