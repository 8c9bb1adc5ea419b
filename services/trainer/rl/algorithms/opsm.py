"""Off-policy sequence masking: bad responses that the policy has moved away from are left out.

DeepSeek-V3.2, arXiv:2512.02556.
"""

from __future__ import annotations

from torch import Tensor

from services.trainer.rl.algorithms.numerics import precise, sequence_mean


def opsm_mask(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """0 where A < 0 and the mean of logπ_old - logπ over the response's trained tokens exceeds `delta`, else 1.

    Float32 [B, R], without gradient.
    """
    moved = precise(old_log_probs.detach()) - precise(log_probs.detach())
    return 1.0 - ((advantages < 0) & (sequence_mean(moved, mask) > delta)).float()
