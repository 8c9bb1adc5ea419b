"""A Megatron checkpoint of a tiny architecture, with random weights, in a moment: no model is built."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.models.architecture import Architecture
from headrace.models.torch_dist import rows_of, whole_shape
from services.trainer.hugging_face.torch_dist import write_torch_dist


def random_weights(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Whole parameters of Megatron by their first Hugging Face tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {row.hf[0].name: torch.randn(whole_shape(row), generator=generator) for row, _ in rows_of(architecture)}


def make_torch_dist(folder: Path, architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Writes the folder and returns what is in it."""
    weights = random_weights(architecture, seed)
    write_torch_dist(folder, architecture, weights)
    return weights
