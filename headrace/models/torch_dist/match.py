"""Compares a Megatron checkpoint with an architecture, and finds each weight in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.rows import Row
from headrace.models.torch_dist.common import require_same_arguments
from headrace.models.torch_dist.folder import iteration_folder
from headrace.models.torch_dist.keys import Name, names, rows_of, whole_shape
from headrace.models.torch_dist.tensors import StoredTensor, read_tensors

MAX_PADDING = 8192
"""Megatron pads the vocabulary to a multiple of 128 for each tensor rank."""
_BESIDE = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")
"""What else Megatron saves beside a model's weights, which is not read."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint that holds the model: its tensors, and the name of every row by its first Hugging Face tensor."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    names: Mapping[str, Name]


def matched(folder: Path, architecture: Architecture) -> Matched:
    """Raises ConfigError that names missing and extra tensors, and those of another shape. Reads no weights."""
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
            found[row.hf[0].name] = there[0]
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
    beside = (*_BESIDE, "mtp.") if architecture.num_mtp_layers else _BESIDE
    return sorted(key for key in tensors.keys() - known if not key.startswith(beside) and "_extra_state" not in key)


def _refuse(folder: Path, what: str, keys: Sequence[str]) -> None:
    if keys:
        shown = "; ".join(keys[:_SHOWN]) + ("; …" if len(keys) > _SHOWN else "")
        raise ConfigError(
            f"{folder} {what.format(len(keys))}: {shown}: name a checkpoint of the model whose --hf-checkpoint this is"
        )
