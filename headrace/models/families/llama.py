"""Llama 3 and its siblings: grouped-query attention, gated MLP, stretched rotary frequencies from 3.1 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder
from headrace.models.family import Family, Preset

_SHARED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}
_1B = {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
_3B = {
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
_TP8_PP4 = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
_TP8_PP18 = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 18}


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw)


def _stretched(sizes: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Llama from 3.1 on, for 131,072 tokens."""
    rope = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return _SHARED | {"max_position_embeddings": 131072, "rope_scaling": rope} | dict(sizes)


def _smollm2(hidden: int, mlp: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    return _SHARED | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }


FAMILY = Family(
    model_types=("llama",),
    read=read,
    presets=(
        Preset("llama3-8B", _SHARED | _8B, 8.03e9, {"tensor_model_parallel_size": 4}),
        Preset("llama3-70B", _SHARED | _70B, 70.6e9, _TP8_PP4),
        Preset("llama3.1-8B", _stretched(_8B, 8.0), 8.03e9, {"tensor_model_parallel_size": 4}),
        Preset("llama3.1-70B", _stretched(_70B, 8.0), 70.6e9, _TP8_PP4),
        Preset("llama3.1-405B", _stretched(_405B, 8.0), 405.9e9, _TP8_PP18),
        Preset("llama3.2-1B", _stretched(_1B, 32.0), 1.24e9, {}),
        Preset("llama3.2-3B", _stretched(_3B, 32.0), 3.21e9, {"tensor_model_parallel_size": 2}),
        Preset("llama3.3-70B", _stretched(_70B, 8.0), 70.6e9, _TP8_PP4),
        Preset("smollm2-135M", _smollm2(576, 1536, 30, 9, 3), 0.1345e9, {}),
        Preset("smollm2-360M", _smollm2(960, 2560, 32, 15, 5), 0.3618e9, {}),
        Preset("smollm2-1.7B", _smollm2(2048, 8192, 24, 32, 32), 1.71e9, {}),
    ),
)
