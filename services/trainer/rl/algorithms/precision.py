"""The precision and range of all mathematics here: float32, whatever the model computes in, and no overflow."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(values: Tensor) -> Tensor:
    """Returns the values in float32; float64 stays, so that gradients can be compared with finite differences."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


LOG_RATIO_LIMIT = 20.0
"""exp overflows float32 from 88 on; from 20 on a ratio is far outside of any bound."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Within ±20, to be exponentiated: beyond, the value stays there and the gradient is 0, never 0 · inf."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
