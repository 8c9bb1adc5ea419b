"""Qwen1.5-MoE and Qwen2-MoE: biases on q, k and v, softmax routing, one shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder, read_softmax_experts
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, add_qkv_bias=bool(raw.get("qkv_bias", True)), experts=read_softmax_experts(raw))


_SHARED = {
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_A2_7B = _SHARED | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
}
_A14B = _SHARED | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
}


def _layout(expert_ranks: int) -> dict[str, int]:
    return {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": expert_ranks, **SHARED_OPTIMIZER}


FAMILY = Family(
    model_types=("qwen2_moe",),
    read=read,
    presets=(
        Preset("qwen1.5-MoE-A2.7B", _A2_7B, 14.3e9, _layout(4)),
        Preset("qwen2-57B-A14B", _A14B, 57.4e9, _layout(16)),
    ),
)
