"""Llama 3 and its siblings: grouped-query attention, gated MLP, stretched rotary frequencies from 3.1 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture
from headrace.models.family import Family, Preset
from headrace.models.reading import read_decoder

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


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw)


FAMILY = Family(
    model_types=("llama",),
    read=read,
    presets=(
        Preset(
            "llama3-8B",
            _SHARED
            | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
            8.03e9,
            {"tensor_model_parallel_size": 4},
        ),
        Preset(
            "llama3-70B",
            _SHARED
            | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
            70.6e9,
            {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4},
        ),
    ),
)
