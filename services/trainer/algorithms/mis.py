"""Masked importance sampling: whole answers on which trainer and engine disagree too much are left out.

Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from services.trainer.algorithms.precision import bounded, precise
from services.trainer.algorithms.sequence import sequence_mean, sequence_sum
from services.trainer.algorithms.tis import ImportanceWeights

MisLevel = Literal["sequence", "geometric"]


def mis_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: MisLevel, low: float, high: float
) -> ImportanceWeights:
    """w = ρ for all tokens of a response where low ≤ ρ ≤ high, else 0; float32 [B, R].

    `sequence`: ρ = exp Σ Δ_t, the unbiased weight; `geometric`: ρ = exp mean Δ_t, which does not punish length; with
    Δ = old_log_probs - rollout_log_probs over the trained tokens.
    """
    gap = precise(old_log_probs.detach()) - precise(rollout_log_probs.detach())
    reduce = sequence_sum if level == "sequence" else sequence_mean
    ratio = bounded(reduce(gap, mask)).exp().expand(gap.shape)
    kept = (ratio >= low) & (ratio <= high)
    return ImportanceWeights(torch.where(kept, ratio, 0.0), ratio, (~kept).float(), gap.abs())
