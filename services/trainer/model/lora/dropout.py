"""Dropout of a tensor of which every tensor rank has a slice, or which all have alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlicedDropout:
    """Draws for the whole tensor and takes the rank's slice: what is dropped does not depend on the layout.

    Tensor ranks draw the same numbers, for their generators have the same seed.
    """

    share: float
    """Of the elements that are dropped"""
    dim: int | None
    """The dimension that tensor ranks divide; None: all have the whole tensor."""
    rank: int
    size: int

    def __call__(self, values: Tensor) -> Tensor:
        """The rest is scaled up, so that the expected value stays."""
        if not self.share:
            return values
        shape = list(values.shape)
        if self.dim is not None:
            shape[self.dim] *= self.size
        is_kept = torch.rand(shape, device=values.device) >= self.share
        if self.dim is not None:
            is_kept = is_kept.chunk(self.size, self.dim)[self.rank]
        return values * is_kept.to(values.dtype) / (1.0 - self.share)
