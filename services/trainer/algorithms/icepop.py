"""IcePop: tokens on which trainer and engine disagree too much are left out (Ling team 2025,
Ring-1T, arXiv:2510.18855)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.algorithms.precision import bounded, precise
from services.trainer.algorithms.tis import ImportanceWeights


def icepop_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> ImportanceWeights:
    """w = k where low ≤ k ≤ high, else 0, with k = exp(old_log_probs - rollout_log_probs) for each token."""
    gap = precise(old_log_probs.detach()) - precise(rollout_log_probs.detach())
    ratio = bounded(gap).exp()
    kept = (ratio >= low) & (ratio <= high)
    return ImportanceWeights(torch.where(kept, ratio, 0.0), ratio, (~kept).float(), gap.abs())
