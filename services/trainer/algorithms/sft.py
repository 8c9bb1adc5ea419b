"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from __future__ import annotations

from torch import Tensor


def sft_loss(log_probs: Tensor) -> Tensor:
    """Per token, same shape."""
    return -log_probs
