"""The recurrence under returns and generalized advantages: y_t = x_t + factor · y_{t+1}."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """y_t = Σ_{k ≥ t} factor^(k-t) x_k, float64 [N] from [N]."""
    total, found = 0.0, []
    for value in reversed(values.tolist()):
        total = value + factor * total
        found.append(total)
    return torch.tensor(found[::-1], dtype=torch.float64, device=values.device)
