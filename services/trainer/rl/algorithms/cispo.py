"""CISPO: the importance ratio is clipped, the gradient of no token is lost (MiniMax 2025, arXiv:2506.13585)."""

from __future__ import annotations

from torch import Tensor, clamp

from services.trainer.rl.algorithms.algorithm import TokenLoss
from services.trainer.rl.algorithms.grpo import Grpo
from services.trainer.rl.algorithms.numerics import bounded, precise


class Cispo(Grpo):
    """GRPO's rewards with a loss of its own."""

    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        loss, clipped = cispo_loss(log_probs, old_log_probs, advantages, self.config.eps_clip, self.clip_high)
        return TokenLoss(loss, clipped, log_probs.detach() - old_log_probs)


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Loss and 0/1 indicator of clipping, float32 [B, S]: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A logπ."""
    log_probs = precise(log_probs)
    ratio = bounded(log_probs.detach() - precise(old_log_probs.detach())).exp()
    clipped = clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high)
    return -clipped * precise(advantages.detach()) * log_probs, (clipped != ratio).float()
