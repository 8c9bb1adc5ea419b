"""The clipped policy-gradient loss.

L = max(−rA, −clip(r, 1−ε_lo, 1+ε_hi)·A) with r = exp(logπ − logπ_old). Schulman et al. 2017, PPO, arXiv:1707.06347;
ε_hi > ε_lo is DAPO's clip-higher, arXiv:2503.14476; for A < 0, min(L, −cA), c > 1, is the dual clip, arXiv:1912.09729.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[Tensor, Tensor]:
    """Per token (loss, 1 where the clip holds the gradient back); all [B, S], advantages broadcast."""
    ratio = torch.exp(log_probs - old_log_probs)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    is_clipped = (clipped > plain).float()
    if eps_clip_c is not None:
        bounded = torch.minimum(loss, -eps_clip_c * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, is_clipped
