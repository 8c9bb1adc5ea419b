"""All families and their presets. A new family is a file of its own and a line here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.limits import did_you_mean
from headrace.models.architecture import Architecture
from headrace.models.families import (
    deepseek_v3,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    nemotron_h,
    olmo3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    smollm3,
)
from headrace.models.family import Family, Preset, Table

_SPARSE = (
    "an indexer chooses the keys that its attention sees (DSA), which is not built, and with dense attention it would "
    "be another model"
)
_IMAGES = (
    "it reads images by a tower that is not built: of such models, headrace trains Qwen2.5-VL and Qwen3-VL, and "
    "Qwen3.5 and Gemma 3 on text"
)
_STACKED = "its checkpoint has a layer's experts in two tensors, transposed and all gates first, which are not built"
_GEMMA4 = (
    "its heads have another size in layers of full attention than within windows, where Megatron-core has one for all "
    "layers. Beside that, those layers have no value projection (12B, 26B, 31B), or layers share keys and values and "
    "have embeddings of their own (E2B, E4B), which is not built"
)
_CAPS = "its logits and those of its attention go through a tanh (softcapping), which is not built"

WHY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kimi_linear": ("its linear attention has a decay for each channel, which is not built", ("qwen3_next", "kimi_k2")),
    "deepseek_v32": (_SPARSE, ("deepseek_v3",)),
    "glm_moe_dsa": (_SPARSE, ("glm4_moe", "glm4_moe_lite")),
    "deepseek_v2": ("its routing has softmax scores over groups, without a router bias", ("deepseek_v3",)),
    "kimi_k25": (_IMAGES, ("kimi_k2",)),
    "qwen2_vl": (_IMAGES, ("qwen2_5_vl", "qwen2")),
    "qwen3_vl_moe": (_STACKED, ("qwen3_vl", "qwen3_moe")),
    "glm4v": (_IMAGES, ("glm4",)),
    "glm4v_moe": (_IMAGES, ("glm4_moe",)),
    "mistral3": (_IMAGES, ("mistral",)),
    "mixtral": ("its experts have other names and no shared expert", ("qwen3_moe", "mistral")),
    "chatglm": ("it is GLM-4 in the form before 0414, which transformers calls glm", ("glm4",)),
    "glm": ("it is GLM-4 in the form before 0414", ("glm4",)),
    "qwen": ("it is the first Qwen, whose weights have other names", ("qwen2",)),
    "gemma2": (_CAPS, ("gemma3",)),
    "gemma3n": ("its layers have embeddings of their own and share keys and values, which is not built", ("gemma3",)),
    "gemma4": (_GEMMA4, ("gemma3",)),
    "gemma4_text": (_GEMMA4, ("gemma3_text",)),
    "gemma4_unified": (_GEMMA4, ("gemma3",)),
}
_NEAREST = 3
_LIKE = 0.4


def unsupported(model_type: object, known: Collection[str]) -> str:
    """A sentence that names the type, the reason if it is known, the nearest supported types, and what to do."""
    if not isinstance(model_type, str):
        return f"it has no model_type (found {model_type!r:.40}): name the folder of a Hugging Face model"
    why, near = WHY.get(model_type, ("headrace has no family for it", ()))
    near = near or tuple(difflib.get_close_matches(model_type[:128], sorted(known), n=_NEAREST, cutoff=_LIKE))
    nearest = f"; the nearest that it trains: {', '.join(near)}" if near else ""
    return (
        f"model_type {model_type!r:.80} is not supported: {why}{nearest}. Supported: {', '.join(known)}. `headrace "
        "models` lists sizes; docs/models.md says what a new family needs"
    )


FAMILIES: Sequence[Family] = (
    llama.FAMILY,
    mistral.FAMILY,
    smollm3.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_vl.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    deepseek_v3.FAMILY,
    gpt_oss.FAMILY,
    olmo3.FAMILY,
    gemma3.FAMILY,
    minimax_m2.FAMILY,
    nemotron_h.FAMILY,
)
_BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}


def read_architecture(folder: Path) -> Architecture:
    """Raises ConfigError when the folder is no checkpoint, or of a family that headrace does not know."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"hf_checkpoint {folder} has no config.json: name a Hugging Face model folder")
    try:
        return architecture(json.loads(path.read_text()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no {error}: it is not a complete config.json of its model_type") from error


def architecture(raw: Mapping[str, Any]) -> Architecture:
    """Reads the content of a config.json."""
    named = raw.get("model_type")
    if not isinstance(named, str) or named not in _BY_MODEL_TYPE:
        raise ConfigError(unsupported(named, _BY_MODEL_TYPE), field="hf_checkpoint")
    return _BY_MODEL_TYPE[named].read(raw)


def table(a: Architecture) -> Table:
    """The table between the architecture's Hugging Face names and Megatron's."""
    return _BY_MODEL_TYPE[a.family].table(a)


PRESETS: Mapping[str, Preset] = {preset.name: preset for family in FAMILIES for preset in family.presets}

# Versions of a model differ in these; what its weights are does not depend on them.
_FREE = frozenset({"max_position_embeddings", "norm_epsilon", "rotary_base", "rope_scaling", "kept"})


def find(name: str) -> Preset:
    """Raises ConfigError for a name that is not listed."""
    if name not in PRESETS:
        raise ConfigError(
            f"model {name!r} is not known{did_you_mean(name, PRESETS)}: `headrace models` lists them", field="model"
        )
    return PRESETS[name]


def differences(preset: Preset, found: Architecture) -> Sequence[str]:
    """`num_layers 28, not 36` for everything in which the architecture is not the preset's."""
    mine, theirs = asdict(architecture(preset.config)), asdict(found)
    return [
        f"{name} {theirs[name]}, not {value}"
        for name, value in mine.items()
        if name not in _FREE and value != theirs[name]
    ]
