"""Mistral without a sliding window (7B from v0.2 on, Nemo, Small 24B): Llama's table, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, read_decoder
from headrace.models.family import Family, Preset


def read(raw: Mapping[str, Any]) -> Architecture:
    window = raw.get("sliding_window")
    if window is not None and window < raw["max_position_embeddings"]:
        raise ConfigError(
            f"sliding_window {window} below max_position_embeddings {raw['max_position_embeddings']}: headrace trains "
            "full attention only. Mistral 7B has none from v0.2 on"
        )
    return read_decoder(raw)


def _config(hidden: int, mlp: int, layers: int, vocab: int, theta: float, context: int) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": context,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }


_TP8 = {"tensor_model_parallel_size": 8}

FAMILY = Family(
    model_types=("mistral",),
    read=read,
    presets=(
        Preset(
            "mistral-7B-v0.3", _config(4096, 14336, 32, 32768, 1e6, 32768), 7.25e9, {"tensor_model_parallel_size": 4}
        ),
        Preset("mistral-nemo-12B", _config(5120, 14336, 40, 131072, 1e6, 131072), 12.25e9, _TP8),
        Preset("mistral-small-24B", _config(5120, 32768, 40, 131072, 1e8, 32768), 23.57e9, _TP8),
    ),
)
