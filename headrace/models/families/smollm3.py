"""SmolLM3: a Llama of which every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder
from headrace.models.family import Family, Preset

_EVERY = 4


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, unrotated_layers=_unrotated_layers(raw))


def _unrotated_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """no_rope_layers has a 0 for each of them; else they come at an interval."""
    layers = range(raw["num_hidden_layers"])
    if rotated := raw.get("no_rope_layers"):
        return tuple(layer for layer in layers if not rotated[layer])
    every = raw.get("no_rope_layer_interval") or _EVERY
    return tuple(layer for layer in layers if not (layer + 1) % every)


FAMILY = Family(
    model_types=("smollm3",),
    read=read,
    presets=(
        Preset(
            "smollm3-3B",
            {
                "model_type": "smollm3",
                "attention_bias": False,
                "hidden_act": "silu",
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "max_position_embeddings": 65536,
                "no_rope_layer_interval": 4,
                "num_attention_heads": 16,
                "num_hidden_layers": 36,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_theta": 5000000.0,
                "tie_word_embeddings": True,
                "vocab_size": 128256,
            },
            3.08e9,
            {"tensor_model_parallel_size": 2},
        ),
    ),
)
