"""Whitening: advantages of all data-parallel ranks together get mean 0 and variance 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

EPSILON = 1e-8


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """(x - mean) · rsqrt(var + 1e-8) where the mask is 1, else 0; float32, shapes as given.

    Mean and Bessel-corrected variance are over the masked-in tokens of every rank of `group` (None: this rank alone),
    which all call this together, those without a token too. Sums are taken in float64, so that the result does not
    depend on how tokens are spread over ranks.
    """
    device = masks[0].device if masks else torch.device("cpu")
    kept = [v.double()[m > 0] for v, m in zip(values, masks, strict=True)]
    flat = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64, device=device)
    total, count = _summed(torch.stack((flat.sum(), flat.new_tensor(float(flat.numel())))), group)
    mean = total / count.clamp(min=1.0)
    (squares,) = _summed(((flat - mean) ** 2).sum()[None], group)
    scale = (squares / (count - 1.0).clamp(min=1.0) + EPSILON).rsqrt()
    return [torch.where(m > 0, (v.double() - mean) * scale, 0.0).float() for v, m in zip(values, masks, strict=True)]


def _summed(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(local, group=group)
    return local
