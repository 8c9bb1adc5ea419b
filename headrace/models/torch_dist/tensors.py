"""A checkpoint's `.metadata`: each tensor's type and shape, and where its chunks lie in which file."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.models.torch_dist.folder import METADATA
from headrace.models.torch_dist.pickled import StandIn, read_pickle

MAX_METADATA_BYTES = 1 << 30
_MAX_RANK = 8
_FILE = re.compile(r"[A-Za-z0-9_]+\.distcp")
_DTYPES: tuple[str, ...] = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
_DTYPES += ("float8_e4m3fn", "float8_e5m2")
_DCP, _MCORE = "torch.distributed.checkpoint", "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    f"{_DCP}.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    _MCORE: ("MCoreMetadata", "MCoreSavePlan"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` is that of the whole tensor: all layers together where Megatron stacks them."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of an iteration's folder. Raises ConfigError for a damaged, incomplete or dishonest `.metadata`."""
    path = folder / METADATA
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, and {MAX_METADATA_BYTES} are read at most")
    with path.open("rb") as file:
        metadata = read_pickle(file, path, _resolve)
    try:
        return _tensors(metadata, _sizes(folder))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is no checkpoint's {METADATA}: {str(error)[:300]}: copy it again") from error


def _resolve(module: str, name: str) -> Any:
    if module == "torch":
        return tuple if name == "Size" else name if name in _DTYPES else None
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    return type(name, (StandIn,), {}) if name in _CLASSES.get(module, ()) else None


def _sizes(folder: Path) -> dict[str, int]:
    found = {path.name: path.stat() for path in folder.iterdir() if _FILE.fullmatch(path.name)}
    return {name: facts.st_size for name, facts in found.items() if stat.S_ISREG(facts.st_mode)}


def _tensors(metadata: Any, sizes: Mapping[str, int]) -> dict[str, StoredTensor]:
    _require(isinstance(metadata, StandIn), "it is no Metadata")
    storage = {}
    for index, info in metadata.field("storage_data").items():
        fqn, offset = index.field("fqn"), index.field("offset")
        if offset is not None and isinstance(fqn, str):
            storage[fqn, _numbers(offset)] = info
    found = {}
    for key, entry in metadata.field("state_dict_metadata").items():
        _require(isinstance(key, str), f"a tensor's name is of type {type(key).__name__}")
        if entry.field("size") is not None:  # bytes, such as a layer's extra state, have none
            found[key] = _tensor(key, entry, storage, sizes)
    return found


def _tensor(key: str, entry: Any, storage: Mapping[Any, Any], sizes: Mapping[str, int]) -> StoredTensor:
    shape, dtype = _numbers(entry.field("size")), entry.field("properties").state[0]
    _require(isinstance(dtype, str) and dtype in _DTYPES, f"{key} has no type of numbers")
    chunks = tuple(_chunks(key, shape, entry.field("chunks"), storage, sizes))
    elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    _require(elements == math.prod(shape), f"the chunks of {key} have {elements} of {math.prod(shape)} elements")
    return StoredTensor(dtype, shape, chunks)


def _chunks(
    key: str, shape: tuple[int, ...], entries: list[Any], storage: Mapping[Any, Any], sizes: Mapping[str, int]
) -> Iterator[StoredChunk]:
    for entry in entries:
        offsets, extent = _numbers(entry.field("offsets")), _numbers(entry.field("sizes"))
        _require(len(offsets) == len(extent) == len(shape), f"a chunk of {key} has another rank")
        inside = all(at + size <= whole for at, size, whole in zip(offsets, extent, shape, strict=True))
        _require(inside and 0 not in extent, f"a chunk of {key} lies outside of {list(shape)}")
        info = storage[key, offsets]
        file, start, length = info.field("relative_path"), info.field("offset"), info.field("length")
        _require(isinstance(file, str) and _FILE.fullmatch(file) is not None, f"{key} is in no file of this folder")
        _require(not info.field("transform_descriptors"), f"{key} is compressed, which headrace cannot read")
        start, length = _numbers((start, length))
        _require(file in sizes, f"{file}, which holds {key}, is not there")
        _require(start + length <= sizes[file], f"{file} has {sizes[file]} bytes, and {key} ends at {start + length}")
        yield StoredChunk(offsets, extent, file, start, length)


def _numbers(values: Any) -> tuple[int, ...]:
    _require(isinstance(values, tuple) and len(values) <= _MAX_RANK, "a shape is no tuple of numbers")
    _require(all(type(value) is int and 0 <= value < 1 << 62 for value in values), "a shape is no tuple of numbers")
    return tuple(values)


def _require(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise ValueError(otherwise)
