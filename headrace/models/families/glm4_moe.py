"""GLM-4.5, 4.6 and 4.7: grouped-query attention, half of each head turned, DeepSeek V3's routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, layers_behind, read_decoder, read_sigmoid_experts, rotary_percent
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset

_AIR = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
_FULL = _AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
# 92 layers: seven stages of twelve and one of eight.
_LAYOUT = {
    "pipeline_model_parallel_size": 8,
    "num_layers_in_last_pipeline_stage": 8,
    "expert_model_parallel_size": 32,
    **SHARED_OPTIMIZER,
}
_AIR_LAYOUT = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 32, **SHARED_OPTIMIZER}


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(
        raw,
        rotary_percent=rotary_percent(raw, 0.5),
        qk_layernorm=bool(raw.get("use_qk_norm", False)),
        experts=read_sigmoid_experts(raw),
        kept=layers_behind(raw),
    )


FAMILY = Family(
    model_types=("glm4_moe",),
    read=read,
    presets=(
        Preset("glm-4.5-Air", _AIR, 106e9, _AIR_LAYOUT),
        Preset("glm-4.5", _FULL, 355e9, _LAYOUT),
        Preset("glm-4.6", _FULL | {"max_position_embeddings": 202752}, 355e9, _LAYOUT),
        Preset("glm-4.7", _FULL | {"max_position_embeddings": 202752}, 355e9, _LAYOUT),
    ),
)
