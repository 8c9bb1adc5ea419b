"""Qwen3's mixtures of experts: softmax routing, no shared experts, no groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, Experts
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset
from headrace.models.reading import read_decoder


def read(raw: Mapping[str, Any]) -> Architecture:
    experts = Experts(
        # transformers 5 renamed it when it writes a config
        count=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        topk=raw["num_experts_per_tok"],
        dense_layers=_dense_layers(raw),
        shared_ffn_hidden_size=None,
        score_function="softmax",
        normalized=bool(raw["norm_topk_prob"]),
        scaling_factor=None,
        has_router_bias=False,
        num_groups=None,
        groups_per_token=None,
    )
    return read_decoder(raw, qk_layernorm=True, experts=experts)


def _dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    only, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step") or 1
    return tuple(n for n in range(raw["num_hidden_layers"]) if n in only or (n + 1) % step)


def _config(hidden: int, mlp: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
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
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }


def _layout(expert_ranks: int) -> dict[str, int]:
    return {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": expert_ranks, **SHARED_OPTIMIZER}


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
    ),
)
