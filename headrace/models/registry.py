"""All families. A new family is a file of its own and a line here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.families import (
    deepseek_v3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    llama,
    mistral,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from headrace.models.family import Family
from headrace.models.rows import Table
from headrace.models.unsupported import unsupported

FAMILIES: Sequence[Family] = (
    llama.FAMILY,
    mistral.FAMILY,
    smollm3.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    deepseek_v3.FAMILY,
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
