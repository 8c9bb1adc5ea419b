"""The weights of a Hugging Face folder that are INT4, packed as compressed-tensors writes them (Kimi K2 Thinking).

`X.weight_packed` in int32, eight values each; `X.weight_scale`, a factor for each group of a row; `X.weight_shape`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
METHOD = "compressed-tensors"
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Engines repack others once, at their start, and take no new ones (SGLang: CompressedTensorsWNA16)."""
TO_PLAIN = "python -m services.trainer.hugging_face.rewrite.to_plain MODEL FOLDER (bfloat16)"


def int4_group(config: Mapping[str, Any]) -> int:
    """The number of a row's values that share a factor. Raises ConfigError for another packing than this one."""
    quantization = config.get("quantization_config") or {}
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], dict) else None
    said = weights if isinstance(weights, dict) else {}
    wanted: Mapping[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    wrong = [f"{name} {said.get(name)!r}" for name, value in wanted.items() if said.get(name) != value]
    if quantization.get("format") != "pack-quantized":
        wrong.append(f"format {quantization.get('format')!r}")
    size: Any = said.get("group_size")
    if type(size) is not int or size < 1:
        wrong.append(f"group_size {size!r}")
    if wrong:
        raise ConfigError(
            f"its quantization_config has {', '.join(wrong)}. headrace reads pack-quantized INT4, symmetric, with a "
            "factor for each group: name a folder in bfloat16",
            field="hf_checkpoint",
        )
    return int(size)
