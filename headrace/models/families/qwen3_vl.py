"""Qwen3-VL: Qwen3 whose prompts may hold images; https://arxiv.org/abs/2511.21631.

The decoder is trained. The vision tower, `model.visual` in the checkpoint, is kept as it is. Its features go into the
first decoder layers too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.models.architecture import Architecture, read_decoder, rope_parameters
from headrace.models.families.qwen2_5_vl import read_vision, text_of
from headrace.models.family import Family, Preset, Table, decoder

_TOWER = "model.visual."
_DEEPSTACK = (8, 16, 24)
"""The layers of the tower whose features the first decoder layers get, in a config that names none."""


def read(raw: Mapping[str, Any]) -> Architecture:
    text = text_of(raw)
    axes = _interleaved(rope_parameters(text)["mrope_section"])
    levels = len(raw["vision_config"].get("deepstack_visual_indexes", _DEEPSTACK))
    return read_decoder(text, qk_layernorm=True, vision=read_vision(raw, 16, axes, _TOWER, levels), kept=(_TOWER,))


def _interleaved(sections: Sequence[int]) -> list[int]:
    """Axes in turns as long as the later ones last; the rest turns with time."""
    return [n % 3 if n < 3 * sections[n % 3] else 0 for n in range(sum(sections))]


def table(a: Architecture) -> Table:
    return decoder(a, "model.language_model")


def _tower(hidden: int, mlp: int, layers: int, features: tuple[int, ...], decoder: int) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": list(features),
        "depth": layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "in_channels": 3,
        "intermediate_size": mlp,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": decoder,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


_SMALL = partial(_tower, 1024, 4096, 24, (5, 11, 17))
_LARGE = partial(_tower, 1152, 4304, 27, _DEEPSTACK)


def _config(
    hidden: int, mlp: int, layers: int, heads: int, tower: Callable[[int], dict[str, Any]], *, tied: bool = False
) -> dict[str, Any]:
    text = {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 262144,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": tied,
        "vocab_size": 151936,
    }
    return {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": text,
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": tower(hidden),
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


_TP2 = {"tensor_model_parallel_size": 2}
_TP4 = {"tensor_model_parallel_size": 4}
_TP8_PP2 = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}

FAMILY = Family(
    model_types=("qwen3_vl",),
    read=read,
    table=table,
    presets=(
        Preset("qwen3-vl-2B", _config(2048, 6144, 28, 16, _SMALL, tied=True), 1.72e9, {}),
        Preset("qwen3-vl-4B", _config(2560, 9728, 36, 32, _SMALL, tied=True), 4.02e9, _TP2),
        Preset("qwen3-vl-8B", _config(4096, 12288, 36, 32, _LARGE), 8.19e9, _TP4),
        Preset("qwen3-vl-32B", _config(5120, 25600, 64, 64, _LARGE), 32.8e9, _TP8_PP2),
    ),
)
