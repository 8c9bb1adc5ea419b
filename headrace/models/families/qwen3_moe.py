"""Qwen3's mixtures of experts: softmax routing, no shared experts, no groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder, read_softmax_experts
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, qk_layernorm=True, experts=read_softmax_experts(raw))


def _config(
    hidden: int, mlp: int, expert: int, layers: int, heads: int, experts: int = 128, groups: int = 4
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }


def _layout(expert_ranks: int) -> dict[str, int]:
    return {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": expert_ranks, **SHARED_OPTIMIZER}


# 62 layers: seven stages of eight and one of six.
_CODER = {
    "pipeline_model_parallel_size": 8,
    "num_layers_in_last_pipeline_stage": 6,
    "expert_model_parallel_size": 32,
    **SHARED_OPTIMIZER,
}

FAMILY = Family(
    model_types=("qwen3_moe",),
    read=read,
    presets=(
        Preset("qwen3-30B-A3B", _config(2048, 6144, 768, 48, 32), 30.5e9, _layout(8)),
        Preset(
            "qwen3-235B-A22B",
            _config(4096, 12288, 1536, 94, 64),
            235e9,
            _layout(64),
        ),
        Preset("qwen3-coder-480B-A35B", _config(6144, 8192, 2560, 62, 96, experts=160, groups=8), 480e9, _CODER),
    ),
)
