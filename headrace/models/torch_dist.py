"""Checkpoint folders of Megatron-core (`torch_dist`), as slime's converter and Megatron-LM write them. Knows no torch.

In: a folder from anywhere. Out: where each weight of an architecture lies in it, or an error that names what is wrong.
Its files are pickles: none is unpickled in the usual sense, and nothing that they name is imported.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, is_same_setting
from headrace.models.family import FusedGateUp, GateUp, Row, Transposed, TransposedGateUp
from headrace.models.registry import table

TRACKER = "latest_checkpointed_iteration.txt"
METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
RELEASE = "release"
FORMAT = "torch_dist"
_MAX_TEXT_BYTES = 1 << 16
_ITERATION = re.compile(r"iter_\d{7,}")


def is_torch_dist(folder: Path) -> bool:
    """True for a folder that Megatron wrote, whole or not, or for the folder of one of its iterations."""
    names = (folder / TRACKER, folder / CONFIG, folder / METADATA)
    return any(path.exists() for path in names) or any(_ITERATION.fullmatch(path.name) for path in _inside(folder))


def iteration_folder(folder: Path) -> Path:
    """The iteration that the folder's tracker names, or the folder itself. Raises ConfigError unless it is complete."""
    chosen = folder if (folder / CONFIG).exists() or (folder / METADATA).exists() else folder / _latest(folder)
    missing = [name for name in (CONFIG, METADATA, COMMON) if not _is_file(chosen / name)]
    if missing:
        raise ConfigError(
            f"{chosen} has no {', no '.join(missing)}: Megatron writes them last, so the checkpoint is not whole: "
            "copy it again, or name the folder of another iteration"
        )
    _require_format(chosen / CONFIG)
    return chosen


def _latest(folder: Path) -> str:
    path = folder / TRACKER
    if not _is_file(path):
        there = ", ".join(sorted(each.name for each in _inside(folder) if _ITERATION.fullmatch(each.name))[:5])
        raise ConfigError(
            f"{folder} has no {TRACKER}"
            + (
                f" but {there}: name one of these folders"
                if there
                else ": write it, with the number of the iteration or the word release"
            )
        )
    text = path.read_bytes()[:_MAX_TEXT_BYTES].decode(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{path} says {text[:50]!r}: it has to be the number of an iteration, or {RELEASE}")
    return f"iter_{int(text):07d}"


def _require_format(path: Path) -> None:
    try:
        found = json.loads(path.read_bytes()[:_MAX_TEXT_BYTES])
        backend = found["sharded_backend"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is no checkpoint's {CONFIG}: {str(error)[:100]}: copy it again") from error
    if backend != FORMAT:
        raise ConfigError(
            f"{path} says sharded_backend {str(backend)[:50]!r}, and headrace reads {FORMAT}: convert it with Megatron "
            f"(--ckpt-format {FORMAT})"
        )


def _is_file(path: Path) -> bool:
    return path.exists() and stat.S_ISREG(path.stat().st_mode)


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


# Reads a stranger's pickle as data: what it names is never imported, and nothing of it is run.
#
# A pickle builds objects by naming callables. Here a name that the file's format has is answered with a `StandIn`,
# which keeps what it is given and does nothing; another name is refused. So a pickle can build lists, dicts and stand-
# ins only.

Resolve = Callable[[str, str], Any]
"""What stands for a module's name; None refuses it."""
_SHOWN = 200


class StandIn:
    """Stands for an object: what its class would have been called with, and its state."""

    def __new__(cls, *args: Any, **_: Any) -> StandIn:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing reads the items of a subclass of dict."""

    def append(self, value: Any) -> None:
        """Nothing reads the items of a subclass of list."""

    def extend(self, values: Any) -> None:
        """Ignores the values, as `append` does."""

    def field(self, name: str) -> Any:
        """A field of the object, None without one."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path, resolve: Resolve) -> None:
        super().__init__(file)
        self._path = path
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._resolve(module, name)) is None:
            raise ConfigError(
                f"{self._path} asks for {module[:_SHOWN]}.{name[:_SHOWN]}, which no checkpoint of Megatron-core holds: "
                "nothing of it was run; do not trust this folder, and get the checkpoint from another place"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return None  # a tensor's storage, which nobody asks for


def read_pickle(file: BinaryIO, path: Path, resolve: Resolve) -> Any:
    """The pickle's content. Raises ConfigError that names `path`, and the class where `resolve` refuses it."""
    try:
        return _Reader(file, path, resolve).load()
    except ConfigError:
        raise
    except Exception as error:  # bytes from anywhere may fail in any way, and nothing but stand-ins was built
        raise ConfigError(f"{path} is damaged: {type(error).__name__} {str(error)[:_SHOWN]}: copy it again") from error


# The arguments of the Megatron that wrote a checkpoint (`common.pt`), compared with the model of this job.
#
# Two models can have tensors of the same shapes: with other heads, another rotary base, other routing.

_MAX_PICKLE_BYTES = 256 << 20
_PLAIN = {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple, "complex": StandIn}
_PACKAGES: tuple[str, ...] = (
    "argparse",
    "collections",
    "copyreg",
    "_codecs",
    "datetime",
    "enum",
    "functools",
    "megatron",
    "numpy",
)
_PACKAGES += ("pathlib", "sglang", "signal", "slime", "torch", "transformer_engine", "transformers", "types")
"""Arguments hold objects of these packages, which are read as stand-ins."""


def require_same_arguments(folder: Path, architecture: Architecture) -> None:
    """Raises ConfigError that names the arguments which contradict the architecture, as far as there are any."""
    there, here = arguments(folder / COMMON), facts(architecture)
    wrong = [
        f"{name} is {str(there[name])[:50]} there and {wanted} here"
        for name, wanted in here.items()
        if isinstance(there.get(name), int | float | str) and not is_same_setting(there[name], wanted)
    ]
    if wrong:
        raise ConfigError(
            f"{folder} is of another model: {', '.join(wrong)}: name a checkpoint of the model whose --hf-checkpoint "
            "this is"
        )


def arguments(path: Path) -> Mapping[str, Any]:
    """Megatron's arguments by name, none where the file has none. Raises ConfigError for another kind of file."""
    try:
        with zipfile.ZipFile(path) as file:
            [member] = [each for each in file.infolist() if each.filename.endswith("/data.pkl")]
            if member.file_size > _MAX_PICKLE_BYTES:
                raise ConfigError(f"{path} has a pickle of {member.file_size} bytes: {_MAX_PICKLE_BYTES} are read")
            content = file.read(member)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ConfigError(f"{path} is not a file of torch.save: {str(error)[:200]}: copy it again") from error
    found = read_pickle(io.BytesIO(content), path, _resolve_argument)
    args = found.get("args") if isinstance(found, dict) else None
    state = args.state if isinstance(args, StandIn) else None
    return state if isinstance(state, dict) else {}


def _resolve_argument(module: str, name: str) -> Any:
    if module in ("builtins", "__builtin__"):
        return _PLAIN.get(name)
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    return type(name, (StandIn,), {}) if module.partition(".")[0] in _PACKAGES else None


def facts(a: Architecture) -> dict[str, Any]:
    """The arguments that Megatron has of every model; `argparse` leaves None where nothing was said."""
    found: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "norm_epsilon": a.norm_epsilon,
        "rotary_base": a.rotary_base,
        "rotary_percent": a.rotary_percent,
    }
    if a.latent_attention is None:
        found["kv_channels"] = a.kv_channels
    if a.experts:
        found |= {"num_experts": a.experts.count, "moe_router_topk": a.experts.topk}
        found |= {"moe_router_score_function": a.experts.score_function}
    return found


# The names that Megatron-core gives a weight in a checkpoint.
#
# Layers of one kind are stacked ([layers, …] under `decoder.layers.`), others have a number each; experts are stacked
# within a layer, or have a number each too. A norm is named as Transformer Engine's fused layers have it, or as its
# own.

FUSED_NORMS: Mapping[str, str] = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""A norm's name, and its name within the linear layer behind it in Transformer Engine."""
LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.experts."
_HALVES = ("_w", "_v")


@dataclass(frozen=True, slots=True)
class Name:
    """A weight's name: of several keys, one below the other; of a stacked tensor, the part at `index`."""

    keys: tuple[str, ...]
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    """The sizes of the dimensions that `index` chooses from."""


def rows_of(architecture: Architecture) -> Iterator[tuple[Row, int | None]]:
    """Every row of the model with its layer."""
    rows = table(architecture)
    yield from ((row, None) for row in rows.first)
    for layer in range(rows.num_layers):
        yield from ((row, layer) for row in rows.layer(layer))
    yield from ((row, None) for row in rows.last)


def whole_shape(row: Row) -> tuple[int, ...]:
    """The shape of Megatron's parameter on a single rank."""
    first = row.hf[0].shape
    if isinstance(row.sharding, Transposed | TransposedGateUp):
        return first[::-1]
    return (sum(tensor.shape[0] for tensor in row.hf), *first[1:])


def names(architecture: Architecture, row: Row, layer: int | None) -> Iterator[Name]:
    """Every name that a version of Megatron-core may have given the weight."""
    for name in whole_names(architecture, row, layer):
        yield name
        if isinstance(row.sharding, GateUp | FusedGateUp | TransposedGateUp):
            yield Name(tuple(name.keys[0] + half for half in _HALVES), name.index, name.stack)


def whole_names(architecture: Architecture, row: Row, layer: int | None) -> Iterator[Name]:
    """Every name of the weight as one tensor, the name that is usual for an expert first."""
    if layer is None:
        yield Name((row.megatron,))
        return
    layers = architecture.num_layers
    if row.expert is None or architecture.experts is None:
        fuses = architecture.latent_attention is not None or not row.megatron.startswith("self_attention.")
        fused = FUSED_NORMS.get(row.megatron) if fuses else None
        for name in (row.megatron, *([fused] if fused else [])):
            yield Name((f"{LAYERS}{layer}.{name}",))
            yield Name((LAYERS + name,), (layer,), (layers,))
        return
    expert, experts, name = row.expert, architecture.experts.count, row.megatron.rpartition("{expert}.")[2]
    yield Name((f"{LAYERS}{layer}.{EXPERTS}{name}",), (expert,), (experts,))
    yield Name((f"{LAYERS}{EXPERTS}{name}",), (layer, expert), (layers, experts))
    yield Name((f"{LAYERS}{layer}.{EXPERTS}{expert}.{name}",))


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
        metadata = read_pickle(file, path, _resolve_metadata)
    try:
        return _tensors(metadata, _sizes(folder))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is no checkpoint's {METADATA}: {str(error)[:300]}: copy it again") from error


def _resolve_metadata(module: str, name: str) -> Any:
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


MAX_PADDING = 8192
"""Megatron pads the vocabulary to a multiple of 128 for each tensor rank."""
_BESIDE = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")
"""What else Megatron saves beside a model's weights, which is not read."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_SHOWN_TENSORS = 5


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint that holds the model: its tensors, and each row's name by its first Hugging Face tensor's key."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    names: Mapping[str, Name]


def matched(folder: Path, architecture: Architecture) -> Matched:
    """Raises ConfigError that names missing and extra tensors, and those of another shape. Reads no weights."""
    if architecture.linear_attention:
        raise ConfigError(
            f"{folder}: Megatron's checkpoints of {architecture.family} are not read, because its linear "
            "attention has other weights there: name a Hugging Face folder"
        )
    chosen = iteration_folder(folder)
    require_same_arguments(chosen, architecture)
    tensors = read_tensors(chosen)
    found: dict[str, Name] = {}
    known: set[str] = set()
    missing, differing = [], []
    for row, layer in rows_of(architecture):
        there = [name for name in names(architecture, row, layer) if all(key in tensors for key in name.keys)]
        known.update(key for name in there for key in name.keys)
        if not there:
            missing.append(next(iter(names(architecture, row, layer))).keys[0])
        elif difference := _difference(tensors, there[0], row):
            differing.append(difference)
        else:
            found[row.hf[0].key] = there[0]
    _refuse(chosen, "lacks {} tensors of this model", missing)
    _refuse(chosen, "is of another model: {} tensors differ", list(dict.fromkeys(differing)))
    _refuse(chosen, "holds {} tensors that this model does not have", _extra(tensors, known, architecture))
    return Matched(chosen, tensors, found)


def _difference(tensors: Mapping[str, StoredTensor], name: Name, row: Row) -> str | None:
    wanted = whole_shape(row)
    shapes = [tensors[key].shape for key in name.keys]
    parts = len(shapes)
    padding = MAX_PADDING if _is_padded(row) else 0
    for key, shape in zip(name.keys, shapes, strict=True):
        if tensors[key].dtype not in _FLOATS:
            return f"{key} is of type {tensors[key].dtype}, not one of {', '.join(_FLOATS)}"
        expected = (*name.stack, wanted[0] // parts, *wanted[1:])
        if shape != expected and not (shape[1:] == expected[1:] and 0 < shape[0] - expected[0] < padding):
            return f"{key} has shape {list(shape)} there and {list(expected)} here"
    return None


def _is_padded(row: Row) -> bool:
    return row.megatron in ("embedding.word_embeddings.weight", "output_layer.weight")


def _extra(tensors: Mapping[str, StoredTensor], known: set[str], architecture: Architecture) -> list[str]:
    beside = (*_BESIDE, "mtp.") if architecture.kept else _BESIDE
    return sorted(key for key in tensors.keys() - known if not key.startswith(beside) and "_extra_state" not in key)


def _refuse(folder: Path, what: str, keys: Sequence[str]) -> None:
    if keys:
        shown = "; ".join(keys[:_SHOWN_TENSORS]) + ("; …" if len(keys) > _SHOWN_TENSORS else "")
        raise ConfigError(
            f"{folder} {what.format(len(keys))}: {shown}: name a checkpoint of the model whose --hf-checkpoint this is"
        )
