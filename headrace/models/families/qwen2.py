"""Qwen2 and Qwen2.5: grouped-query attention with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.architecture import Architecture, read_decoder
from headrace.models.family import Family, Preset


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, add_qkv_bias=True)


def _config(hidden: int, mlp: int, layers: int, heads: int, groups: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }


_TP4 = {"tensor_model_parallel_size": 4}
_TP8 = {"tensor_model_parallel_size": 8}
_PP2 = {"pipeline_model_parallel_size": 2}
_PP4 = {"pipeline_model_parallel_size": 4}

FAMILY = Family(
    model_types=("qwen2",),
    read=read,
    presets=(
        Preset("qwen2-0.5B", _config(896, 4864, 24, 14, 2, 151936, True), 0.494e9, {}),
        Preset("qwen2-1.5B", _config(1536, 8960, 28, 12, 2, 151936, True), 1.54e9, {}),
        Preset("qwen2-7B", _config(3584, 18944, 28, 28, 4, 152064, False), 7.61e9, _TP4),
        Preset("qwen2-72B", _config(8192, 29568, 80, 64, 8, 152064, False), 72.7e9, _TP8 | _PP4),
        Preset("qwen2.5-0.5B", _config(896, 4864, 24, 14, 2, 151936, True), 0.494e9, {}),
        Preset("qwen2.5-1.5B", _config(1536, 8960, 28, 12, 2, 151936, True), 1.54e9, {}),
        Preset("qwen2.5-3B", _config(2048, 11008, 36, 16, 2, 151936, True), 3.09e9, {}),
        Preset("qwen2.5-7B", _config(3584, 18944, 28, 28, 4, 152064, False), 7.61e9, _TP4),
        Preset("qwen2.5-14B", _config(5120, 13824, 48, 40, 8, 152064, False), 14.7e9, _TP8),
        Preset(
            "qwen2.5-32B",
            _config(5120, 27648, 64, 40, 8, 152064, False),
            32.5e9,
            _TP8 | _PP2,
        ),
        Preset(
            "qwen2.5-72B",
            _config(8192, 29568, 80, 64, 8, 152064, False),
            72.7e9,
            _TP8 | _PP4,
        ),
    ),
)
