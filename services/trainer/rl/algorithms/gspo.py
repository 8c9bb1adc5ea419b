"""GSPO: one importance ratio for a whole answer (Zheng et al. 2025, arXiv:2507.18071)."""

from __future__ import annotations

from torch import Tensor

from services.trainer.rl.algorithms.numerics import precise, sequence_mean


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns for every token of a response the mean of logπ - logπ_old over its trained tokens; float32 [B, R].

    The clipped loss is then taken of its exponential. Gradients flow to `log_probs` alone.
    """
    difference = precise(log_probs) - precise(old_log_probs.detach())
    return sequence_mean(difference, mask).expand(difference.shape)
