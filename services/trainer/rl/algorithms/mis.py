"""Importance sampling between trainer and engine, rejection, and the distance between the two policies.

Weights are per token or per response and bounded in three ways. Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training" (truncated, per token); Liu et al. 2025, "When Speed Kills Stability: Demystifying
RL Collapse from the Training-Inference Mismatch". The distance is over whole responses: perplexities, KL and χ².
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from services.trainer.rl.algorithms.numerics import bounded, precise, sequence_mean, sequence_sum

MisLevel = Literal["token", "sequence", "geometric"]
MisMode = Literal["truncate", "clip", "mask"]

LEAST_MEAN_WEIGHT = 1e-8
"""Weights whose mean is no larger are not normalized: they would be raised to 1, as if nothing had been corrected."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Float32 tensors in the shape of the log-probs, without gradient; reduce them as the loss is reduced."""

    weights: Tensor
    """What the loss is multiplied by: the ratio within its bounds."""
    truncated: Tensor
    """1 where a bound took effect, else 0."""


def importance_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: MisLevel) -> Tensor:
    """ρ for every token, float32 [B, R], its logarithm within ±20; Δ = old_log_probs - rollout_log_probs.

    `token`: exp Δ_t; `sequence`: exp Σ Δ_t over the trained tokens of the answer, the unbiased weight; `geometric`:
    exp mean Δ_t, which does not punish length.
    """
    gap = precise(old_log_probs.detach()) - precise(rollout_log_probs.detach())
    match level:
        case "token":
            return bounded(gap).exp()
        case "sequence":
            return bounded(sequence_sum(gap, mask)).exp().expand(gap.shape)
        case "geometric":
            return bounded(sequence_mean(gap, mask)).exp().expand(gap.shape)
        case _:
            assert_never(level)


def mis_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    level: MisLevel,
    low: float,
    high: float,
    mode: MisMode = "mask",
) -> ImportanceWeights:
    """`truncate`, `clip`: ρ cut to [low, high]; `mask`: ρ within it and 0 elsewhere; float32 [B, R].

    The first two differ in the bounds that a job takes for them: `truncate` has low = 0 unless it is asked for another.
    """
    ratio = importance_ratio(old_log_probs, rollout_log_probs, mask, level)
    if mode == "mask":
        kept = (ratio >= low) & (ratio <= high)
        return ImportanceWeights(torch.where(kept, ratio, 0.0), (~kept).float())
    weights = ratio.clamp(low, high)
    return ImportanceWeights(weights, (weights != ratio).float())


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """1 where a sample is kept by rejection sampling, else 0."""
    return ((ratio >= low) & (ratio <= high)).float()


def not_vetoed(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """0 for all tokens of an answer of which one trained token has exp Δ_t below the threshold, else 1; [B, R]."""
    gap = precise(old_log_probs.detach()) - precise(rollout_log_probs.detach())
    catastrophic = ((gap < math.log(threshold)) & (mask > 0)).any(dim=1, keepdim=True)
    return (~catastrophic).float().expand(gap.shape)


def mean_weight_sums(found: ImportanceWeights, mask: Tensor, level: MisLevel, mode: MisMode) -> Tensor:
    """[2]: the sum of the weights, and of what they are a mean over: trained tokens, or answers where they have one.

    What is masked out for its ratio is in neither.
    """
    counted = mask > 0 if mode != "mask" else (mask > 0) & (found.weights > 0)
    if level == "token":
        return torch.stack((torch.where(counted, found.weights, 0.0).sum(), counted.sum())).double()
    answers = counted.any(dim=1, keepdim=True)
    return torch.stack((sequence_mean(found.weights, counted.float()).sum(), answers.sum())).double()


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
    """Each of an answer's figures summed over the answers with a trained token, from [B, R]; and how many these are.

    With Δ = trainer - engine: kl is the mean of -Δ, k3_kl that of e^Δ - 1 - Δ, chi2_token that of e^2Δ, less 1, and
    chi2_sequence is e^(2 Σ Δ) - 1. Exponents are within ±20, those of squares within ±40.
    """
    trainer, engine = precise(trainer.detach()), precise(engine.detach())
    gap = trainer - engine
    training_log_ppl, rollout_log_ppl = -sequence_mean(trainer, mask), -sequence_mean(engine, mask)
    apart = training_log_ppl - rollout_log_ppl
    figures = {
        "mismatch/training_log_ppl": training_log_ppl,
        "mismatch/training_ppl": bounded(training_log_ppl).exp(),
        "mismatch/rollout_log_ppl": rollout_log_ppl,
        "mismatch/rollout_ppl": bounded(rollout_log_ppl).exp(),
        "mismatch/kl": sequence_mean(-gap, mask),
        "mismatch/k3_kl": sequence_mean(bounded(gap).expm1() - gap, mask),
        "mismatch/log_ppl_diff": apart,
        "mismatch/log_ppl_abs_diff": apart.abs(),
        "mismatch/ppl_ratio": bounded(apart).exp(),
        "mismatch/chi2_token": sequence_mean((2 * bounded(gap)).exp(), mask) - 1.0,
        "mismatch/chi2_sequence": (2 * bounded(sequence_sum(gap, mask))).exp() - 1.0,
    }
    answers = (mask > 0).any(dim=1, keepdim=True)
    sums = {name: torch.where(answers, values, 0.0).sum() for name, values in figures.items()}
    return sums | {"answers": answers.sum()}


def opsm_mask(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """0 where A < 0 and the mean of logπ_old - logπ over the response's trained tokens exceeds `delta`, else 1.

    Off-policy sequence masking: bad responses that the policy has moved away from are left out (DeepSeek-V3.2,
    arXiv:2512.02556). Float32 [B, R], without gradient.
    """
    moved = precise(old_log_probs.detach()) - precise(log_probs.detach())
    return 1.0 - ((advantages < 0) & (sequence_mean(moved, mask) > delta)).float()
