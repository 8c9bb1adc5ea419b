"""Truncated importance sampling between the trainer's and the engine's idea of the same policy.

w = clamp(exp(logπ_train − logπ_rollout), low, high), no gradient. Yao et al. 2025, https://fengyao.notion.site/off-policy-rl
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_importance_weights(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, *, low: float, high: float
) -> Tensor:
    """Per token, same shape."""
    return torch.exp(trainer_log_probs.detach() - rollout_log_probs).clamp(low, high)
