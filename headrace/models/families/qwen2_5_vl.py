"""Qwen2.5-VL: Qwen2.5 whose prompts may hold images; https://arxiv.org/abs/2502.13923.

The decoder is trained. The vision tower, `visual` in the checkpoint, is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, Vision, read_decoder, rope_parameters, rope_type
from headrace.models.family import Family, Preset

_CHANNELS = 3


def read(raw: Mapping[str, Any]) -> Architecture:
    sections = rope_parameters(text_of(raw))["mrope_section"]
    axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    return read_decoder(
        text_of(raw), add_qkv_bias=True, vision=read_vision(raw, 14, axes, "visual."), kept=("visual.",)
    )


def text_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's values: in text_config, or beside the vision tower's, as older versions wrote them."""
    text = {**raw, **raw.get("text_config", {}), "model_type": raw["model_type"]}
    if (kind := rope_type(text)) not in ("default", "mrope"):
        raise ConfigError(f"rope_scaling of type {kind!r} is not supported; supported: default, mrope")
    return {**text, "rope_parameters": {**rope_parameters(text), "rope_type": "default"}}


def read_vision(raw: Mapping[str, Any], patch_size: int, axes: Sequence[int], name: str, deepstack: int = 0) -> Vision:
    """`patch_size` is that of a config that names none."""
    tower = raw["vision_config"]
    patch = tower.get("patch_size", patch_size)
    return Vision(
        image_token_id=raw["image_token_id"],
        patch_values=_CHANNELS * tower.get("temporal_patch_size", 2) * patch * patch,
        merge_size=tower.get("spatial_merge_size", 2),
        rotary_axes=tuple(axes),
        tower=name,
        deepstack=deepstack,
    )


def _config(hidden: int, mlp: int, layers: int, heads: int, groups: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "image_token_id": 151655,
        "intermediate_size": mlp,
        "max_position_embeddings": 128000,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "vision_config": {},
        "vocab_size": vocab,
    }


FAMILY = Family(
    model_types=("qwen2_5_vl",),
    read=read,
    presets=(
        Preset("qwen2.5-vl-3B", _config(2048, 11008, 36, 16, 2, 151936, True), 3.09e9, {}),
        Preset(
            "qwen2.5-vl-7B",
            _config(3584, 18944, 28, 28, 4, 152064, False),
            7.61e9,
            {"tensor_model_parallel_size": 4},
        ),
    ),
)
