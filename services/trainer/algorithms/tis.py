"""Truncated importance sampling: corrects for an engine whose log-probs differ from the trainer's.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.trainer.algorithms.precision import bounded, precise


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Float32 tensors in the shape of the log-probs, without gradient; reduce them as the loss is reduced."""

    weights: Tensor
    """What the loss is multiplied by: the ratio within its bounds."""
    ratio: Tensor
    """exp(trainer - engine), its logarithm within ±20; 1 where both agree."""
    truncated: Tensor
    """1 where a bound took effect, else 0."""
    log_prob_gap: Tensor
    """|trainer - engine|."""


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> ImportanceWeights:
    """w = clamp(exp(old_log_probs - rollout_log_probs), low, high): old by the trainer, rollout by the engine."""
    gap = precise(old_log_probs.detach()) - precise(rollout_log_probs.detach())
    ratio = bounded(gap).exp()
    weights = ratio.clamp(low, high)
    return ImportanceWeights(weights, ratio, (weights != ratio).float(), gap.abs())
