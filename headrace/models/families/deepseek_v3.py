"""DeepSeek V3, V3.1 and R1, Moonlight, and Kimi K2: multi-head latent attention, shared experts, a router bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import (
    Architecture,
    LatentAttention,
    layers_behind,
    read_decoder,
    read_sigmoid_experts,
    yarn_rope,
)
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset

_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_KIMI_K2 = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
_MOONLIGHT = _DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
# 61 layers: seven stages of eight and one of five.
_LAYOUT = {
    "pipeline_model_parallel_size": 8,
    "num_layers_in_last_pipeline_stage": 5,
    "expert_model_parallel_size": 64,
    **SHARED_OPTIMIZER,
}


def read(raw: Mapping[str, Any]) -> Architecture:
    if not raw.get("rope_interleave", True):
        raise ConfigError("rope_interleave false is not what Megatron-core computes in latent attention")
    rope = yarn_rope(raw)
    if rope is not None and rope.has_exact_range:
        raise ConfigError("rope_scaling truncate false is not what Megatron-core computes in latent attention")
    latent = LatentAttention(
        q_lora_rank=raw["q_lora_rank"],
        kv_lora_rank=raw["kv_lora_rank"],
        qk_head_dim=raw["qk_nope_head_dim"],
        qk_pos_emb_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw["v_head_dim"],
    )
    plain = {name: value for name, value in raw.items() if name not in ("rope_scaling", "rope_parameters")}
    return read_decoder(
        plain | {"rope_theta": _rope_theta(raw)},
        kv_channels=raw["v_head_dim"],
        num_query_groups=raw["num_attention_heads"],
        rope_scaling=rope,
        latent_attention=latent,
        experts=read_sigmoid_experts(raw),
        kept=layers_behind(raw),
    )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    found = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
    return float(found or 10000.0)


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    read=read,
    presets=(
        Preset("moonlight-16B-A3B", _MOONLIGHT, 15.96e9, {"expert_model_parallel_size": 8, **SHARED_OPTIMIZER}),
        Preset("deepseek-v3", _DEEPSEEK_V3, 671e9, _LAYOUT),
        Preset("deepseek-v3.1", _DEEPSEEK_V3, 671e9, _LAYOUT),
        Preset("deepseek-r1", _DEEPSEEK_V3, 671e9, _LAYOUT),
        Preset("kimi-k2", _KIMI_K2, 1.04e12, _LAYOUT),
        Preset("kimi-k2-Thinking", _KIMI_K2 | {"max_position_embeddings": 262144}, 1.04e12, _LAYOUT),
    ),
)
