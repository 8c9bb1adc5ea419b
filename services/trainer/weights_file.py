"""Tensors and a few numbers on disk: NAME.safetensors and NAME.json. Nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import DataLoss


def save_state(stem: Path, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """Writes both files."""
    # Copies, because parameters are views into one buffer and safetensors refuses shared storage.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, str(stem.with_suffix(".safetensors")))
    stem.with_suffix(".json").write_text(json.dumps(scalars))


def load_state(stem: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads both files. Raises DataLoss when one is missing."""
    if not stem.with_suffix(".safetensors").is_file() or not stem.with_suffix(".json").is_file():
        raise DataLoss(f"the checkpoint lacks {stem}.safetensors or .json: it was made by another number of ranks")
    return load_file(str(stem.with_suffix(".safetensors"))), json.loads(stem.with_suffix(".json").read_text())
