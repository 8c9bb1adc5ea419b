"""Supervised fine-tuning: the negative log-likelihood, per token."""

from __future__ import annotations

from torch import Tensor

from services.trainer.rl.algorithms.numerics import precise


def sft_loss(log_probs: Tensor) -> Tensor:
    """-log π of every token, float32 in the shape of `log_probs`."""
    return -precise(log_probs)
