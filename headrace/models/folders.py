"""Hugging Face folders, without torch: whether one is complete, what of it is quantized, programs that rewrite one."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.errors import ConfigError, HeadraceError
from headrace.models.packed_int4 import EXPERT, METHOD, PACKED, TO_PLAIN, int4_group

# Checks without torch that a Hugging Face folder is complete, without reading its weights.
#
# An export gets its name in one rename when it is durable. A folder may still be torn: written by an earlier version,
# or copied in part.

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


_SAMPLE_BYTES = 1 << 20


def base_digest(folder: Path) -> str:
    """Tells folders of different weights apart: the config, and of each file its name, size, beginning and end."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in sorted(_weights(folder)):
        with (folder / name).open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{name} {size}\n".encode())
            for start in (0, max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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


# The weights of a Hugging Face folder that are FP8 with a factor for each block, as DeepSeek publishes checkpoints, or
# packed INT4 with a factor for each group of a row.
#
# Engines that are given such a folder compute with them, and take new weights in the same form. FP8: `X.weight` in
# float8_e4m3fn and `X.weight_scale_inv` in float32, by which it is multiplied. INT4: see packed_int4.

SCALE = "_scale_inv"
_TO_FP8 = ", or python -m services.trainer.hugging_face.rewrite.to_fp8 MODEL FOLDER"


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """The names of the weights, and rows and columns of a block that share a factor."""

    weights: frozenset[str]
    block: tuple[int, int]
    num_tensors: int
    """The number of tensors in the folder, without factors."""
    bits: int = 8
    """8 for FP8, 4 for packed INT4."""

    def __str__(self) -> str:
        return "block FP8" if self.bits == 8 else "INT4"

    @classmethod
    def of(cls, folder: Path) -> QuantizedForm | None:
        """None for a folder that is not quantized, or has no config. Raises ConfigError for another quantization."""
        if not (folder / "config.json").is_file():
            return None
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        quantization = config.get("quantization_config")
        if not quantization:
            return None
        names = tensor_names(folder)
        if quantization.get("quant_method") == METHOD:
            return cls._of_int4(folder, config, names)
        block = _block(folder, quantization)
        weights = frozenset(name for name in names if name + SCALE in names)
        return cls(weights, block, len(names) - len(weights))

    @classmethod
    def _of_int4(cls, folder: Path, config: Mapping[str, Any], names: frozenset[str]) -> QuantizedForm:
        try:
            block = 1, int4_group(config)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error.message}", field="hf_checkpoint") from error
        weights = frozenset(name.removesuffix(PACKED) for name in names if name.endswith(f".weight{PACKED}"))
        if others := sorted(name for name in weights if not EXPERT.search(name)):
            raise ConfigError(
                f"{folder} has {len(others)} weights in INT4 beside its experts ({others[0]}), which engines cannot be "
                f"given anew: write it in another form and name that folder: {TO_PLAIN}{_TO_FP8}",
                field="hf_checkpoint",
            )
        return cls(weights, block, len(names) - 2 * len(weights), bits=4)


def _block(folder: Path, quantization: Mapping[str, Any]) -> tuple[int, int]:
    method, block = quantization.get("quant_method"), cast(Any, quantization.get("weight_block_size"))
    scheme, scale_format = quantization.get("activation_scheme", "dynamic"), quantization.get("scale_fmt")
    is_square = isinstance(block, list) and len(block) == 2 and type(block[0]) is int and block[0] == block[1] > 0
    wrong = (
        f"quant_method {method!r}"
        if method != "fp8"
        else f"fmt {quantization['fmt']!r}"
        if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn")
        else f"weight_block_size {block!r}"
        if not is_square
        else f"activation_scheme {scheme!r}"
        if scheme != "dynamic"
        else f"scale_fmt {scale_format!r}"
        if scale_format not in (None, "float")
        else None
    )
    if method == "mxfp4":
        raise ConfigError(
            f"{folder} is in MXFP4, in which engines cannot be given new weights: write it in another form and name "
            f"that folder: {TO_PLAIN}",
            field="hf_checkpoint",
        )
    if wrong:
        raise ConfigError(
            f"{folder}: its quantization_config has {wrong}. headrace gives engines bfloat16, FP8 (e4m3) with a "
            "float32 factor for each square block and activation_scheme dynamic, or packed INT4: name a folder of one "
            "of these",
            field="hf_checkpoint",
        )
    return int(block[0]), int(block[1])


def main_of(module: str, about: str | None, model: str, write: Callable[[Path, Path], str]) -> int:
    """Calls `write(model, folder)` with the two folders of the command line, and prints what it says was written.

    `model` says what kind of folder the first one is. Returns the exit code: 2 after an error, which is printed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("model", type=Path, help=model)
    parser.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    given = parser.parse_args()
    try:
        written = write(given.model, given.folder)
    except HeadraceError as error:
        print(f"{module.rpartition('.')[2]}: {error.message}", file=sys.stderr)  # noqa: T201  # one line to a person
        return 2
    print(f"{given.folder}: {written}")  # noqa: T201  # one line to a person
    return 0
