"""The distance between the trainer's policy and the engine's over whole responses: perplexities, KL and χ²."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.rl.algorithms.precision import bounded, precise
from services.trainer.rl.algorithms.sequence import sequence_mean, sequence_sum


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
