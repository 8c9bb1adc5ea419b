"""GLM-4.7-Flash: DeepSeek V3's latent attention and routing, without groups and without YaRN."""

from __future__ import annotations

from headrace.models.families.deepseek_v3 import read
from headrace.models.family import SHARED_OPTIMIZER, Family, Preset

_FLASH = {
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

FAMILY = Family(
    model_types=("glm4_moe_lite",),
    read=read,
    presets=(Preset("glm-4.7-Flash", _FLASH, 29.9e9, {"expert_model_parallel_size": 16, **SHARED_OPTIMIZER}),),
)
