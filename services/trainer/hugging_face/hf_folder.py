"""The tensors of a Hugging Face folder: checked by name, and read one at a time, never a whole model or file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.family import Row
from headrace.models.packed_int4 import PACKED, SCALE, SHAPE, int4_group
from headrace.models.registry import table
from services.trainer.hugging_face.shards import cut, merge
from services.trainer.weights.quantization import dequantized, unpacked_int4, unpacked_mxfp4

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
"""What the weights of gpt-oss that are in MXFP4 have in the place of their name's end."""
_BESIDE = (_SCALE, _SCALES, f".weight{SCALE}", f".weight{SHAPE}")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HfFolder:
    """Reads through the index if there is one; FP8, packed INT4 and MXFP4 are multiplied out.

    With an architecture, its table says which stacked tensors are read under the names of their parts.
    """

    def __init__(self, folder: Path, architecture: Architecture | None = None) -> None:
        self.folder = folder
        self._files = self._weight_map()
        rows = table(architecture).rows() if architecture else ()
        stacked = [(row, row.stack) for row in rows if row.stack and row.stack.hf[0].name in self._files]
        self._stacked = {tensor.name: (*pair, place) for pair in stacked for place, tensor in enumerate(pair[0].hf)}
        self._stacks = {stack.hf[0].name for _, stack in stacked}

    @property
    def names(self) -> frozenset[str]:
        """All weights; what quantized ones have beside them is none."""
        return frozenset(self._stacked) | frozenset(
            name.removesuffix(PACKED) if name.endswith(f".weight{PACKED}") else name.removesuffix(_BLOCKS)
            for name in self._files.keys() - self._stacks
            if not name.endswith(_BESIDE)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        if self._is_packed(name):
            return self._shape_of_packed(name)
        if self._is_mxfp4(name):
            *stack, rows, groups, num_bytes = self._shape_in_file(name + _BLOCKS)
            return (*stack, groups * num_bytes * 2, rows)
        if name in self._stacked:
            row, _, place = self._stacked[name]
            return row.hf[place].shape
        return self._shape_in_file(name)

    def tensor(self, name: str, slot: int | None = None) -> Tensor:
        """One tensor, or the part at `slot` of its first dimension, on the CPU; what is quantized comes as float32."""
        if self._is_mxfp4(name):
            if name + _SCALES not in self._files:
                raise ConfigError(
                    f"{self.folder}: {name}{_BLOCKS} is there without {name}{_SCALES}: download the whole model"
                )
            return unpacked_mxfp4(self._raw(name + _BLOCKS, slot), self._raw(name + _SCALES, slot))
        if self._is_packed(name):
            scale, shape = self._raw(name + SCALE), self._shape_of_packed(name)
            return unpacked_int4(self._raw(name + PACKED), scale, shape, self._group)
        if name in self._stacked:
            row, stack, place = self._stacked[name]
            return self._parts_of(row, stack)[place]
        raw = self._raw(name, slot)
        if raw.dtype not in _FP8:
            return raw
        if name + _SCALE not in self._files:
            raise ConfigError(
                f"{self.folder}: {name} is {raw.dtype} and has no {name}{_SCALE}: export it with its "
                "scales, or in bfloat16"
            )
        return dequantized(raw, self._raw(name + _SCALE), self._block)

    def stored(self, name: str) -> dict[str, Tensor]:
        """A weight as the files have it, quantized or not, with what is beside it there."""
        ends = ("", PACKED, SCALE, SHAPE, _SCALE, _BLOCKS, _SCALES)
        return {name + end: self._raw(name + end) for end in ends if name + end in self._files}

    def _is_mxfp4(self, name: str) -> bool:
        return name not in self._files and name + _BLOCKS in self._files

    def _is_packed(self, name: str) -> bool:
        return name not in self._files and name + PACKED in self._files

    def _shape_of_packed(self, name: str) -> tuple[int, ...]:
        if lacking := [part for part in (name + SCALE, name + SHAPE) if part not in self._files]:
            raise ConfigError(f"{self.folder}: {name}{PACKED} is there without {lacking[0]}: download the whole model")
        shape = self._raw(name + SHAPE)
        if shape.numel() != 2:
            raise ConfigError(f"{self.folder}: {name}{SHAPE} has {shape.numel()} numbers, not rows and columns")
        return tuple(int(size) for size in shape)

    def parts(self, row: Row) -> list[Tensor]:
        if row.stack and row.hf[0].name in self._stacked:
            return self._parts_of(row, row.stack)
        for tensor in row.hf:
            if tensor.slot == 0 and (shape := self.shape(tensor.name)) != tensor.whole.shape:
                raise ConfigError(
                    f"{self.folder}: {tensor.name} has shape {list(shape)}, not {list(tensor.whole.shape)}: weights "
                    "and config.json are of different models"
                )
        return [self.tensor(tensor.name, tensor.slot) for tensor in row.hf]

    def _parts_of(self, row: Row, stack: Row) -> list[Tensor]:
        return merge(row.sharding, [cut(stack.sharding, self.parts(stack), rank=0, size=1)])

    def _raw(self, name: str, slot: int | None = None) -> Tensor:
        with self._opened(name) as file:
            tensor: Tensor = file.get_tensor(name) if slot is None else file.get_slice(name)[slot]
            return tensor

    def _shape_in_file(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def _opened(self, name: str) -> Any:
        return safe_open(str(self.folder / self._files[name]), framework="pt")

    @cached_property
    def _block(self) -> tuple[int, int]:
        rows, columns = (self._config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        return int(rows), int(columns)

    @cached_property
    def _group(self) -> int:
        try:
            return int4_group(self._config)
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {error.message}", field="hf_checkpoint") from error

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    def _weight_map(self) -> Mapping[str, str]:
        if (self.folder / INDEX).is_file():
            index: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            return index
        if not (self.folder / SINGLE).is_file():
            raise ConfigError(f"hf_checkpoint {self.folder} has neither {SINGLE} nor {INDEX}: export it as safetensors")
        with safe_open(str(self.folder / SINGLE), framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)


_TIED_HEAD = "lm_head.weight"
_SHOWN = 5


def check_names(source: HfFolder, architecture: Architecture) -> None:
    """Raises ConfigError that names the missing or the extra ones."""
    expected = {tensor.name for tensor in table(architecture).tensors()}
    found = {name for name in source.names if not name.endswith("rotary_emb.inv_freq")}
    found -= set(passthrough_names(found, architecture))
    if not architecture.untie_embeddings_and_output_weights:
        found.discard(_TIED_HEAD)  # some exporters write the tied head too
    if missing := sorted(expected - found):
        raise ConfigError(
            f"{source.folder} lacks {len(missing)} tensors that its config.json asks for: {missing[:_SHOWN]}"
        )
    if extra := sorted(found - expected):
        raise ConfigError(
            f"{source.folder} holds {len(extra)} tensors that its config.json does not name: {extra[:_SHOWN]}"
        )


def passthrough_names(names: Iterable[str], architecture: Architecture) -> list[str]:
    """Returns the names of what is not trained: layers that predict further tokens, and a vision tower."""
    return sorted(name for name in names if name.startswith(tuple(architecture.kept)))
