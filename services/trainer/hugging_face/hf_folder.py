"""The tensors of a Hugging Face folder, read one at a time: never a whole model, nor a whole file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.rows import Row
from services.trainer.weights.dequantizing import dequantized

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SCALE = "_scale_inv"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HfFolder:
    """Reads through the index if there is one; FP8 blocks are multiplied out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._weight_map()

    @property
    def names(self) -> frozenset[str]:
        """All weights; the scales of FP8 blocks are not weights."""
        return frozenset(name for name in self._files if not name.endswith(_SCALE))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        with safe_open(str(self.folder / self._files[name]), framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU; FP8 comes back as float32."""
        raw = self._raw(name)
        if raw.dtype not in _FP8:
            return raw
        if name + _SCALE not in self._files:
            raise ConfigError(
                f"{self.folder}: {name} is {raw.dtype} and has no {name}{_SCALE}: export it with its "
                "scales, or in bfloat16"
            )
        return dequantized(raw, self._raw(name + _SCALE), self._block)

    def parts(self, row: Row) -> list[Tensor]:
        """The tensors that a parameter is made of."""
        return [self.tensor(tensor.name) for tensor in row.hf]

    def _raw(self, name: str) -> Tensor:
        with safe_open(str(self.folder / self._files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    @cached_property
    def _block(self) -> tuple[int, int]:
        config: Mapping[str, Any] = json.loads((self.folder / "config.json").read_text())
        rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        return int(rows), int(columns)

    def _weight_map(self) -> Mapping[str, str]:
        if (self.folder / INDEX).is_file():
            index: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            return index
        if not (self.folder / SINGLE).is_file():
            raise ConfigError(f"hf_checkpoint {self.folder} has neither {SINGLE} nor {INDEX}: export it as safetensors")
        with safe_open(str(self.folder / SINGLE), framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
