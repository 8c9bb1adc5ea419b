"""The weights of a Hugging Face folder that are FP8 with a factor for each block, as DeepSeek publishes checkpoints.

Engines that are given such a folder compute in FP8, and take new weights in the same form: `X.weight` in float8_e4m3fn
and `X.weight_scale_inv` in float32, by which it is multiplied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.errors import ConfigError
from headrace.models.exported import tensor_names
from headrace.models.packed_int4 import METHOD, TO_PLAIN

SCALE = "_scale_inv"


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """The names of the weights, and rows and columns of a block."""

    weights: frozenset[str]
    block: tuple[int, int]
    num_tensors: int
    """The number of tensors in the folder, without factors."""

    @classmethod
    def of(cls, folder: Path) -> BlockFp8 | None:
        """None for a folder that is not quantized, or has no config. Raises ConfigError for another quantization."""
        if not (folder / "config.json").is_file():
            return None
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        quantization = config.get("quantization_config")
        if not quantization:
            return None
        block = _block(folder, quantization)
        names = tensor_names(folder)
        weights = frozenset(name for name in names if name + SCALE in names)
        return cls(weights, block, len(names) - len(weights))


def _block(folder: Path, quantization: Mapping[str, Any]) -> tuple[int, int]:
    method, block = quantization.get("quant_method"), cast(Any, quantization.get("weight_block_size"))
    scheme, scale_format = quantization.get("activation_scheme", "dynamic"), quantization.get("scale_fmt")
    is_square = isinstance(block, list) and len(block) == 2 and type(block[0]) is int and block[0] == block[1] > 0
    wrong = (
        f"quant_method {method!r}"
        if method != "fp8"
        else f"fmt {quantization['fmt']!r}"
        if quantization.get("fmt", "e4m3") != "e4m3"
        else f"weight_block_size {block!r}"
        if not is_square
        else f"activation_scheme {scheme!r}"
        if scheme != "dynamic"
        else f"scale_fmt {scale_format!r}"
        if scale_format not in (None, "float")
        else None
    )
    if method == METHOD:
        raise ConfigError(
            f"{folder} is in INT4 ({METHOD}), in which engines cannot be given new weights: write it in another form "
            f"and name that folder: {TO_PLAIN}, or python -m services.trainer.hugging_face.rewrite.to_fp8 MODEL FOLDER",
            field="hf_checkpoint",
        )
    if wrong:
        raise ConfigError(
            f"{folder}: its quantization_config has {wrong}. headrace gives engines bfloat16, or FP8 (e4m3) with a "
            "float32 factor for each square block and activation_scheme dynamic: name a folder of one of these",
            field="hf_checkpoint",
        )
    return int(block[0]), int(block[1])
