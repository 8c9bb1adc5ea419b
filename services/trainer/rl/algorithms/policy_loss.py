"""The clipped policy-gradient loss, per token."""

from __future__ import annotations

from torch import Tensor, clamp, maximum, minimum, where

from services.trainer.rl.algorithms.precision import bounded, precise


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[Tensor, Tensor]:
    """Loss and 0/1 indicator of clipping, both float32 [B, S], from log-probs [B, S] and advantages [B, S] or [B, 1].

    r = exp(log_probs - old_log_probs), the logarithm within ±20; loss = max(-r A, -clip(r, 1 - eps_clip,
    1 + eps_clip_high) A) (PPO, arXiv:1707.06347; the asymmetric clip is DAPO's, arXiv:2503.14476). With `eps_clip_c`
    (c > 1), where A < 0 the loss is at most -c A (dual clip, arXiv:1912.09729). Gradients flow to `log_probs` alone.
    """
    advantages = precise(advantages.detach())
    ratio = bounded(precise(log_probs) - precise(old_log_probs.detach())).exp()
    free = -ratio * advantages
    clipped_loss = -clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss, clipped = maximum(free, clipped_loss), clipped_loss > free
    if eps_clip_c is None:
        return loss, clipped.float()
    ceiling = -eps_clip_c * advantages
    dual = (advantages < 0) & (loss > ceiling)
    return where(advantages < 0, minimum(loss, ceiling), loss), (clipped | dual).float()
