"""Qwen3.5 and Qwen3.6: Qwen3-Next's layers, dense or with experts, in a model that reads images too.

The decoder is trained, on text. The vision tower and the layers that predict further tokens are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_softmax_experts
from headrace.models.families.qwen3_next import read_hybrid
from headrace.models.family import SHARED_OPTIMIZER, Family, FusedGateUp, Preset, Split, Stacks, Table, decoder

_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
_WITH_TOWER = ("qwen3_5", "qwen3_5_moe")
_STACKS: Stacks = (("gate_up_proj", FusedGateUp()), ("down_proj", Split(1)))
"""As the models are published. Transformers writes a tensor for each expert."""


def read(raw: Mapping[str, Any]) -> Architecture:
    """The decoder's values are in text_config, or alone in a model of text."""
    text = {**raw, **raw.get("text_config", {}), "model_type": raw["model_type"]}
    kept = ("mtp.", "model.visual.")
    if raw["model_type"] not in _MOE:
        return read_hybrid(text, is_interleaved=False, kept=kept)
    experts = read_softmax_experts({"norm_topk_prob": True, **text})
    every = {"intermediate_size": text["moe_intermediate_size"], **text}
    return read_hybrid(every, is_interleaved=False, experts=experts, kept=kept)


def table(a: Architecture) -> Table:
    return decoder(a, "model.language_model" if a.family in _WITH_TOWER else "model", _STACKS)


def _config(
    hidden: int, layers: int, heads: int, groups: int, value_heads: int, sizes: Mapping[str, int], *, tied: bool = False
) -> dict[str, Any]:
    text = {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": tied,
        "vocab_size": 248320,
        **sizes,
    }
    model_type = "qwen3_5_moe" if "num_experts" in sizes else "qwen3_5"
    return {"model_type": model_type, "text_config": text, "tie_word_embeddings": tied}


def _experts(count: int, topk: int, width: int) -> dict[str, int]:
    return {
        "num_experts": count,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


_27B = _config(5120, 64, 24, 4, 48, {"intermediate_size": 17408})
_35B = _config(2048, 40, 16, 2, 32, _experts(256, 8, 512))
_397B = _config(4096, 60, 32, 2, 64, _experts(512, 10, 1024))
_TP4_PP2 = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}


def _layout(stages: int, expert_ranks: int) -> dict[str, int]:
    return {"pipeline_model_parallel_size": stages, "expert_model_parallel_size": expert_ranks, **SHARED_OPTIMIZER}


FAMILY = Family(
    model_types=("qwen3_5", "qwen3_5_text", *_MOE),
    read=read,
    table=table,
    presets=(
        Preset("qwen3.5-0.8B", _config(1024, 24, 8, 2, 16, {"intermediate_size": 3584}, tied=True), 0.75e9, {}),
        Preset("qwen3.5-27B", _27B, 26.9e9, _TP4_PP2),
        Preset("qwen3.6-27B", _27B, 26.9e9, _TP4_PP2),
        Preset("qwen3.5-35B-A3B", _35B, 34.7e9, _layout(2, 16)),
        Preset("qwen3.6-35B-A3B", _35B, 34.7e9, _layout(2, 16)),
        Preset("qwen3.5-397B-A17B", _397B, 396e9, _layout(10, 32)),
    ),
)
