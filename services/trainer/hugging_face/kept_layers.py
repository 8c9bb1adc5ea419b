"""Layers that are not trained and are exported as they came: those that predict further tokens, a vision tower."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.models.registry import read_architecture
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.files.tensor_file import write_tensors
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.hugging_face.names import kept_names
from services.trainer.weights.buckets import cut


def write_kept_layers(hf_checkpoint: Path, draft: Path, dtype: str, file_bytes: int, part: Path) -> None:
    """Copies them from the checkpoint into files of their own, matrices in `dtype`; `part` lists them for the index."""
    source = HfFolder(hf_checkpoint)
    names = kept_names(source.names, read_architecture(hf_checkpoint))
    if not names:
        return
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, specs in enumerate(_files(source, names, file_bytes)):
        file = f"model-kept-{number + 1:05d}.safetensors"
        content = {spec.name: _as(source.tensor(spec.name), dtype) for spec in specs}
        write_tensors(draft / file, content, {"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
        num_bytes += sum(tensor.nbytes for tensor in content.values())
    part.write_text(json.dumps({"weight_map": weight_map, "num_bytes": num_bytes}))


def _files(source: HfFolder, names: Sequence[str], file_bytes: int) -> list[list[TensorSpec]]:
    return cut([TensorSpec(name, source.shape(name), "float32") for name in names], file_bytes)


def _as(tensor: Tensor, dtype: str) -> Tensor:
    """Matrices may have been FP8; norms and router biases stay as they are."""
    return tensor.to(getattr(torch, dtype)) if tensor.ndim > 1 else tensor
