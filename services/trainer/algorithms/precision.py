"""The precision of all mathematics here: float32, whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(values: Tensor) -> Tensor:
    """In float32; float64 stays, so that gradients can be held against finite differences."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
