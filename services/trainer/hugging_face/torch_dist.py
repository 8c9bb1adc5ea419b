"""The weights of a checkpoint in Megatron-core's format `torch_dist`: read one tensor at a time, and written.

What reads imports nothing that a file names: `headrace.models.torch_dist` says where each tensor lies, and `torch.load`
with `weights_only` reads it. torch's own FileSystemReader would unpickle `.metadata` freely, convert what is not of the
type that `.metadata` says, and unpack what is compressed to any size; so it is used for writing alone.

One process writes a whole model, one tensor after the other, under the names that Megatron-core gives them. The folder
says `release`: weights alone, which Megatron-LM and slime start from.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.family import Row
from headrace.models.torch_dist import (
    COMMON,
    CONFIG,
    FORMAT,
    LAYERS,
    RELEASE,
    TRACKER,
    Name,
    StoredChunk,
    facts,
    matched,
    rows_of,
    whole_names,
    whole_shape,
)
from services.trainer.durable import new_folder
from services.trainer.hugging_face.shards import merge

_CLASS = re.compile(r"(?:GLOBAL|Unsupported class|global) ([\w.]+)")


class TorchDistFolder:
    """Raises ConfigError unless the folder holds this architecture, whole."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._found = matched(folder, architecture)
        self._cells = cache(self._chunks_by_index)

    def parts(self, row: Row) -> list[Tensor]:
        name = self._found.names[row.hf[0].key]
        wanted = whole_shape(row)
        halves = [self._read(key, name.index)[: wanted[0] // len(name.keys)] for key in name.keys]
        return merge(row.sharding, [torch.cat(halves)])

    def _read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """One weight of a stack. Its chunks must cover it exactly once."""
        stored = self._found.tensors[key]
        shape = stored.shape[len(index) :]
        whole = torch.empty(shape, dtype=getattr(torch, stored.dtype))
        covered = torch.zeros(shape, dtype=torch.bool)
        for chunk in self._cells(key, len(index)).get(index, ()):
            at = tuple(where - offset for where, offset in zip(index, chunk.offsets, strict=False))
            rest = zip(chunk.offsets[len(index) :], chunk.sizes[len(index) :], strict=True)
            box = tuple(slice(offset, offset + size) for offset, size in rest)
            if covered[box].any():
                raise ConfigError(f"{self._found.folder}: two chunks of {key} overlap: get the checkpoint again")
            whole[box] = self._load(key, chunk, stored.dtype)[at]
            covered[box] = True
        if not covered.all():
            raise ConfigError(f"{self._found.folder}: the chunks of {key} leave gaps: get the checkpoint again")
        return whole

    def _chunks_by_index(self, key: str, stacked: int) -> dict[tuple[int, ...], list[StoredChunk]]:
        found = defaultdict(list)
        for chunk in self._found.tensors[key].chunks:
            ranges = zip(chunk.offsets[:stacked], chunk.sizes[:stacked], strict=True)
            for index in product(*(range(offset, offset + size) for offset, size in ranges)):
                found[index].append(chunk)
        return dict(found)

    def _load(self, key: str, chunk: StoredChunk, dtype: str) -> Tensor:
        path = self._found.folder / chunk.file
        with path.open("rb") as file:
            file.seek(chunk.start)
            content = file.read(chunk.num_bytes)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as parts:
                if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                    raise ValueError("it is compressed")
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # bytes from anywhere may fail in any way, and torch has refused to run them
            raise ConfigError(f"{path}: {key} {_reason(error)}") from error
        if not isinstance(tensor, Tensor) or (str(tensor.dtype), tuple(tensor.shape)) != (
            f"torch.{dtype}",
            chunk.sizes,
        ):
            raise ConfigError(f"{path}: {key} is not the {dtype} of shape {list(chunk.sizes)} that .metadata says")
        return tensor


def _reason(error: Exception) -> str:
    if found := _CLASS.search(str(error)):
        return (
            f"asks for {found.group(1)}, which is no part of a tensor: nothing of it was run; do not trust this folder"
        )
    return f"cannot be read: {type(error).__name__} {str(error)[:200]}: copy it again"


_LAYOUT_VERSION = 3.0
"""Megatron turns the rows of query, key and value of a checkpoint that does not say this."""


def write_torch_dist(folder: Path, architecture: Architecture, weights: Mapping[str, Tensor]) -> None:
    """`weights` are whole parameters of Megatron by their first Hugging Face tensor's key. Raises AlreadyExists."""
    with new_folder(folder) as draft:
        release = draft / RELEASE
        release.mkdir()
        planner = _Planner(architecture, weights)
        writer = FileSystemWriter(release, per_thread_copy_ahead=0)  # there is no GPU to copy ahead from
        [plan], metadata = create_default_global_save_plan(writer.prepare_global_plan([SavePlan(planner.items)]))
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
        torch.save(_common(architecture), release / COMMON)
        backends = {"sharded_backend": FORMAT, "common_backend": "torch"}
        versions = {"sharded_backend_version": 1, "common_backend_version": 1}
        (release / CONFIG).write_text(json.dumps(backends | versions))
        (draft / TRACKER).write_text(RELEASE)


class _Planner(DefaultSavePlanner):
    """Writes each weight as the part of its stack that its name says, and an empty state for each module."""

    def __init__(self, architecture: Architecture, weights: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.items: list[WriteItem] = []
        self._values: dict[MetadataIndex, Tensor] = {}
        for row, layer in rows_of(architecture):
            for name in _written_names(architecture, row, layer):
                self._add(name, weights[row.hf[0].key].detach())
        for key in dict.fromkeys(_extra_states(architecture)):
            self.items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))

    def _add(self, name: Name, weight: Tensor) -> None:
        values = weight.reshape(*(1 for _ in name.index), *weight.shape)
        offsets = torch.Size((*name.index, *(0 for _ in weight.shape)))
        index = MetadataIndex(name.keys[0], offsets)
        self._values[index] = values
        chunk, properties = ChunkStorageMetadata(offsets, values.shape), TensorProperties(dtype=values.dtype)
        data = TensorWriteData(chunk, properties, torch.Size((*name.stack, *weight.shape)))
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values.get(index, [None])


def _written_names(a: Architecture, row: Row, layer: int | None) -> list[Name]:
    """Of stacked layers, or of each layer in a model with experts.

    A norm gets both its names: which one is read depends on Transformer Engine and the kind of the layer.
    """
    names = list(whole_names(a, row, layer))
    if layer is None or (row.expert is not None and a.experts is not None):
        return names[:1]
    return [name for name in names if bool(name.stack) != bool(a.experts)]


def _extra_states(a: Architecture) -> Iterator[str]:
    """Megatron-core asks for the state beside the weights of each module, which is empty without FP8."""
    for row, layer in rows_of(a):
        for name in _written_names(a, row, layer):
            yield _extra_state(name.keys[0].rpartition(".")[0], name)
        if layer is not None and row.megatron == "input_layernorm.weight":
            attention = "self_attention.core_attention"
            whole = Name((), (layer,), (a.num_layers,))
            yield (
                _extra_state(f"{LAYERS}{layer}.{attention}", Name(()))
                if a.experts
                else _extra_state(LAYERS + attention, whole)
            )


def _extra_state(module: str, name: Name) -> str:
    index, stack = (name.index, name.stack) if name.index else ((0,), (1,))
    return f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"


def _common(a: Architecture) -> dict[str, object]:
    parallel = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    saved = {"no_save_optim": True, "no_save_rng": True, "add_position_embedding": False}
    args = argparse.Namespace(**facts(a), **parallel, **saved)
    return {"args": args, "checkpoint_version": _LAYOUT_VERSION, "iteration": 0}
