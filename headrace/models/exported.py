"""Checks without torch that a Hugging Face folder is complete, without reading its weights.

An export gets its name in one rename when it is durable. A folder may still be torn: written by an earlier version, or
copied in part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

HUGGING_FACE = "hf"
PEFT = "peft"
"""What `headrace export` calls the formats."""
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
NAMES_OF_WEIGHTS = (_SINGLE, _INDEX)
"""Either says which weights a folder should have."""
_LONGEST_HEADER = 100 << 20
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a damaged file may raise while it is read as JSON of its form."""


def is_whole(folder: Path) -> bool:
    """True when the config can be read and every file of weights is as long as its header says."""
    try:
        json.loads((folder / "config.json").read_bytes())
    except _DAMAGE:
        return False
    return damage_of(folder) is None


def damage_of(folder: Path) -> str | None:
    """Returns what is wrong with the weights of a model's folder, by name and length; None where nothing is."""
    try:
        names = sorted(_weights(folder))
    except _DAMAGE as error:
        return f"{_INDEX} cannot be read ({error!s:.100})"
    for name in names:
        try:
            expected, found = _length_by_header(folder / name), (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is not there"
        except _DAMAGE:
            return f"{name} is no safetensors file"
        if expected != found:
            return f"{name} has {found:,} bytes and should have {expected:,}"
    return None


def is_torn(folder: Path) -> bool:
    """True for what is recognisably an export and nothing else, and not whole: it may be written again."""
    names = {path.name for path in folder.iterdir()}
    return "config.json" in names and any(name.endswith(".safetensors") for name in names) and not is_whole(folder)


def tensor_names(folder: Path) -> frozenset[str]:
    """All tensors of the folder, from its index or from the header of its only file. Raises OSError or ValueError."""
    if (folder / _INDEX).exists():
        return frozenset(json.loads((folder / _INDEX).read_bytes())["weight_map"])
    with (folder / _SINGLE).open("rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _LONGEST_HEADER)))
    return frozenset(header) - {"__metadata__"}


def _weights(folder: Path) -> Iterable[str]:
    if (folder / _INDEX).exists():
        return set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    return [_SINGLE]


def _length_by_header(path: Path) -> int:
    """The format: eight bytes with the header's length, the header, the tensors (huggingface.co/docs/safetensors)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    ends: list[int] = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)
