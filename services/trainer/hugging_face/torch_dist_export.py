"""Writes weights as a checkpoint that Megatron-core loads (`torch_dist`), under the names that it gives them.

One process holds the whole model; tensors are written one after the other. The folder appears under its name when all
of it survives a power loss. It says `release`: weights alone, which Megatron-LM and slime start from.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.errors import AlreadyExists
from headrace.models.architecture import Architecture
from headrace.models.rows import Row
from headrace.models.torch_dist.common import facts
from headrace.models.torch_dist.folder import COMMON, CONFIG, FORMAT, METADATA, RELEASE, TRACKER
from headrace.models.torch_dist.keys import EXPERTS, LAYERS, Name, own_names, rows_of
from services.trainer.files.durable import make_folder, put_in_place, remove, sync, sync_files

FILE_BYTES = 4 << 30
_DRAFT = ".draft"
_LAYOUT_VERSION = 3.0
"""Megatron turns the rows of query, key and value of a checkpoint that does not say this."""


def write_torch_dist(
    folder: Path, architecture: Architecture, weights: Mapping[str, Tensor], file_bytes: int = FILE_BYTES
) -> None:
    """`weights` are whole parameters of Megatron by their first Hugging Face tensor. Raises AlreadyExists."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} exists already and is not empty: export to another folder")
    draft = folder.parent / f".{folder.name}{_DRAFT}"
    remove(draft)
    make_folder(draft / RELEASE)
    writer = _Writer(draft / RELEASE, file_bytes)
    for row, layer in rows_of(architecture):
        for name in _names(architecture, row, layer):
            writer.add(name, weights[row.hf[0].name])
    writer.add_nothing(_extra_states(architecture))
    writer.finish(_common(architecture))
    (draft / TRACKER).write_text(RELEASE)
    sync_files(draft)
    if folder.exists():
        folder.rmdir()
    put_in_place(draft, folder)


def _names(a: Architecture, row: Row, layer: int | None) -> Iterator[Name]:
    """Returns Megatron-core's names: of stacked layers, or of each layer in a model with experts."""
    if layer is None:
        yield Name((row.megatron,))
    elif row.expert is not None and a.experts is not None:
        name = row.megatron.rpartition("{expert}.")[2]
        yield Name((f"{LAYERS}{layer}.{EXPERTS}{name}",), (row.expert,), (a.experts.count,))
    else:  # a norm under both names: which one is read depends on Transformer Engine and the kind of the layer
        for name in own_names(a, row):
            yield Name((f"{LAYERS}{layer}.{name}",)) if a.experts else Name((LAYERS + name,), (layer,), (a.num_layers,))


def _extra_states(a: Architecture) -> Iterator[str]:
    """Megatron-core asks for the state beside the weights of each module, which is empty without FP8."""
    for row, layer in rows_of(a):
        for name in _names(a, row, layer):
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


class _Writer:
    """The files of one iteration: chunks behind each other, then what says where they are."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._number = 0
        self._file: BinaryIO = self._path.open("wb")
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._states: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, name: Name, weight: Tensor) -> None:
        """Writes one weight as the part of its stack that its name says."""
        [key] = name.keys
        values = weight.detach().cpu().clone().reshape(*(1 for _ in name.index), *weight.shape)
        offsets = torch.Size((*name.index, *(0 for _ in weight.shape)))
        shape = torch.Size((*name.stack, *weight.shape))
        tensor = TensorStorageMetadata(TensorProperties(dtype=values.dtype), shape, [])
        chunks = self._tensors.setdefault(key, tensor).chunks
        chunks.append(ChunkStorageMetadata(offsets, values.shape))
        self._storage[MetadataIndex(key, offsets)] = self._saved(values)

    def add_nothing(self, keys: Iterator[str]) -> None:
        """Gives each key the same bytes, an empty state."""
        nothing = self._saved([None])
        for key in keys:
            self._states[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = nothing

    def finish(self, common: Mapping[str, object]) -> None:
        """Writes what Megatron reads first, last; all of it is on the disk when it returns."""
        self._close()
        torch.save(dict(common), self._folder / COMMON)
        everything: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**self._tensors, **self._states}
        metadata = Metadata(state_dict_metadata=everything, storage_data=self._storage, version="1.0.0")
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        backends = {"sharded_backend": FORMAT, "common_backend": "torch"}
        versions = {"sharded_backend_version": 1, "common_backend_version": 1}
        (self._folder / CONFIG).write_text(json.dumps(backends | versions))
        sync_files(self._folder)

    def _saved(self, value: object) -> _StorageInfo:
        if self._file.tell() >= self._file_bytes:
            self._close()
            self._number += 1
            self._file = self._path.open("wb")
        start = self._file.tell()
        torch.save(value, self._file)
        return _StorageInfo(self._path.name, start, self._file.tell() - start)

    def _close(self) -> None:
        self._file.close()
        sync(self._path)

    @property
    def _path(self) -> Path:
        return self._folder / f"__0_{self._number}.distcp"
