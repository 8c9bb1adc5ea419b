"""Converts an architecture to fields of Megatron-core's TransformerConfig, or of MLATransformerConfig."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headrace.job.megatron.arguments import MegatronArgs
from headrace.job.megatron.owned import ARCHITECTURAL
from headrace.models.architecture import Architecture, Experts, LatentAttention, Llama3Rope, YarnRope, is_same_setting

_ALWAYS = {
    "position_embedding_type": "rope",
    "no_position_embedding": True,
    "disable_bias_linear": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "use_rotary_position_embeddings": True,
}


def megatron_fields(a: Architecture) -> dict[str, Any]:
    """Every field that follows from the checkpoint, except the activation and dtypes, which are objects of torch."""
    fields: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.kv_channels,
        "layernorm_epsilon": a.norm_epsilon,
        "normalization": a.normalization,
        "gated_linear_unit": a.swiglu,
        "add_bias_linear": False,
        "add_qkv_bias": a.add_qkv_bias,
        # Latent attention always has its norms.
        "qk_layernorm": a.qk_layernorm or a.latent_attention is not None,
        "rotary_interleaved": a.rotary_interleaved,
        "no_rope_freq": [int(layer in a.unrotated_layers) for layer in range(a.num_layers)]
        if a.unrotated_layers
        else None,
    }
    if a.experts:
        fields |= _experts(a.experts, a.num_layers)
    if a.latent_attention:
        fields |= _latent_attention(a, a.latent_attention)
    return fields


def _experts(experts: Experts, num_layers: int) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.topk,
        "moe_layer_freq": [int(experts.in_layer(layer)) for layer in range(num_layers)],
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_score_function": experts.score_function,
        # Scores of all experts first, then the best: then they do not sum to one.
        "moe_router_pre_softmax": experts.score_function == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_enable_expert_bias": experts.has_router_bias,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.groups_per_token,
        "moe_router_dtype": "fp32",
    }


def _latent_attention(a: Architecture, mla: LatentAttention) -> dict[str, Any]:
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": a.rotary_base,
        "rotary_percent": a.rotary_percent,
    }
    if not isinstance(a.rope_scaling, YarnRope):
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = a.rope_scaling
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _in_scripts(a: Architecture, given: MegatronArgs) -> dict[str, Any]:
    """Values of flags that only Megatron's script has; its configs have other names for them."""
    rope = a.rope_scaling
    family = given.spec[0].rpartition(".")[2] if given.spec else ""
    return {
        "group_query_attention": a.num_query_groups < a.num_attention_heads,
        "multi_latent_attention": a.latent_attention is not None,
        "post_self_attn_layernorm": a.post_norms,
        "post_mlp_layernorm": a.post_norms,
        "use_rope_scaling": isinstance(rope, Llama3Rope),
        "spec": given.spec if family == a.family else a.family,
    } | ({"rotary_scaling_factor": rope.factor} if isinstance(rope, Llama3Rope) else {})


def _means_nothing(a: Architecture, name: str, wanted: Any) -> bool:
    """True for a flag that Megatron-core does not read for this architecture, though launch scripts often pass it."""
    if a.latent_attention is not None and name in ("kv_channels", "num_query_groups", "group_query_attention"):
        return True
    if a.experts is None:
        return False
    if name in ("moe_router_num_groups", "moe_router_group_topk"):
        return wanted == 1 and a.experts.num_groups is None
    return name == "moe_router_pre_softmax" and a.experts.score_function == "sigmoid"


def _agrees(a: Architecture, name: str, wanted: Any, said: Any) -> bool:
    if name == "no_rope_freq" and isinstance(wanted, int):
        return list(said or ()) == [int(not (layer + 1) % wanted) for layer in range(a.num_layers)]
    if isinstance(said, list):  # Megatron takes a list of the layers, or says that every n-th has experts
        return list(wanted) == said if isinstance(wanted, tuple) else _every(a.num_layers, wanted) == said
    return is_same_setting(wanted, said)


def _every(num_layers: int, nth: int) -> list[int]:
    return [int(layer % nth == 0) for layer in range(num_layers)] if nth > 0 else []


def _shown(value: Any) -> str:
    return " ".join(str(each) for each in value) if isinstance(value, list | tuple) else str(value)


def contradictions(a: Architecture, given: MegatronArgs) -> list[str]:
    """A sentence for each architecture flag that differs from the checkpoint."""
    mine = asdict(a) | megatron_fields(a) | _ALWAYS | _in_scripts(a, given)
    wrong = [
        f"--{name.replace('_', '-')} {_shown(wanted)} contradicts the checkpoint, whose config.json says "
        f"{_shown(mine.get(name, 'nothing about it'))}: leave the flag out"
        for name, wanted in given.given(ARCHITECTURAL).items()
        if not _agrees(a, name, wanted, mine.get(name, False)) and not _means_nothing(a, name, wanted)
    ]
    if given.seq_length is not None and given.seq_length > a.max_position_embeddings:
        wrong.append(
            f"--seq-length {given.seq_length} is longer than max_position_embeddings {a.max_position_embeddings} of "
            "the checkpoint: leave the flag out"
        )
    return wrong
