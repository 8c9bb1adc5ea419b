"""GSPO: one importance ratio for a whole answer (Zheng et al. 2025, arXiv:2507.18071)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.rl.algorithms.algorithm import TokenLoss
from services.trainer.rl.algorithms.grpo import Grpo
from services.trainer.rl.algorithms.numerics import precise, sequence_mean


class Gspo(Grpo):
    """GRPO's rewards; the ratio that is clipped is the response's."""

    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        log_ratio = sequence_log_ratio(log_probs, old_log_probs, mask)
        found = super().loss(log_ratio, torch.zeros_like(log_ratio), advantages, mask)
        return TokenLoss(found.loss, found.clipped, log_ratio.detach())


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns for every token of a response the mean of logπ - logπ_old over its trained tokens; float32 [B, R].

    The clipped loss is then taken of its exponential. Gradients flow to `log_probs` alone.
    """
    difference = precise(log_probs) - precise(old_log_probs.detach())
    return sequence_mean(difference, mask).expand(difference.shape)
