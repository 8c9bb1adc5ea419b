"""The weights of a checkpoint in Megatron-core's format `torch_dist`: read one tensor at a time, and written.

A chunk is a tensor that torch.save wrote into a file at a place that `.metadata` names. torch's unpickler for weights
reads it, which imports nothing but torch's own parts of a tensor. One process writes a whole model, one tensor after
the other, under the names that Megatron-core gives them. The folder appears under its name when all of it survives a
power loss. It says `release`: weights alone, which Megatron-LM and slime start from.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
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

from headrace.errors import AlreadyExists, ConfigError
from headrace.models.architecture import Architecture
from headrace.models.family import Row
from headrace.models.torch_dist import (
    COMMON,
    CONFIG,
    EXPERTS,
    FORMAT,
    LAYERS,
    METADATA,
    RELEASE,
    TRACKER,
    Name,
    StoredChunk,
    facts,
    matched,
    own_names,
    rows_of,
    whole_shape,
)
from services.trainer.files.durable import make_folder, put_in_place, remove, sync, sync_files
from services.trainer.hugging_face.shards import merge

_CLASS = re.compile(r"(?:GLOBAL|Unsupported class|global) ([\w.]+)")


class TorchDistFolder:
    """Raises ConfigError unless the folder holds this architecture, whole."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._found = matched(folder, architecture)
        self._cells = cache(self._chunks_by_index)

    def parts(self, row: Row) -> list[Tensor]:
        """The Hugging Face tensors that a parameter is made of."""
        name = self._found.names[row.hf[0].name]
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
