"""The weights of a Megatron checkpoint, read one at a time: never a whole model, nor a whole file.

A chunk is a tensor that torch.save wrote into a file at a place that `.metadata` names. torch's unpickler for weights
reads it, which imports nothing but torch's own parts of a tensor.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.rows import Row
from headrace.models.torch_dist.keys import whole_shape
from headrace.models.torch_dist.match import matched
from headrace.models.torch_dist.tensors import StoredChunk
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
