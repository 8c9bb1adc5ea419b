"""Qwen3: grouped-query attention with norms on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder
from headrace.models.family import Family, Preset


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, qk_layernorm=True)


def _config(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "vocab_size": 151936,
    }


_TP2 = {"tensor_model_parallel_size": 2}
_TP4 = {"tensor_model_parallel_size": 4}
_TP8 = {"tensor_model_parallel_size": 8}

FAMILY = Family(
    model_types=("qwen3",),
    read=read,
    presets=(
        Preset("qwen3-0.6B", _config(1024, 3072, 28, 16, True), 0.6e9, {}),
        Preset("qwen3-1.7B", _config(2048, 6144, 28, 16, True), 1.72e9, {}),
        Preset("qwen3-4B", _config(2560, 9728, 36, 32, True), 4.02e9, _TP2),
        Preset("qwen3-8B", _config(4096, 12288, 36, 32, False), 8.2e9, _TP4),
        Preset("qwen3-14B", _config(5120, 17408, 40, 40, False), 14.8e9, _TP8),
        Preset("qwen3-32B", _config(5120, 25600, 64, 64, False), 32.8e9, _TP8 | {"pipeline_model_parallel_size": 2}),
    ),
)
