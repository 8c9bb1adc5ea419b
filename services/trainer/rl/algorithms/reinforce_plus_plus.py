"""REINFORCE++: discounted returns of token rewards, whitened over the batch (Hu et al. 2025, arXiv:2501.03262)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.rl.algorithms.numerics import discounted_sums


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Returns of one response before whitening, float64 [R]: Σ_{k ≥ t} γ^(k-t) r_k over the trained tokens, else 0.

    `rewards` [R] are those of `token_rewards`; γ counts trained tokens.
    """
    trained = mask > 0
    returns = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    returns[trained] = discounted_sums(rewards[trained], gamma)
    return returns


def reinforce_plus_plus_baseline(centered_reward: float, mask: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
    """The variant with the group's mean as baseline, before whitening, float64 [R]: R - mean_g - kl_coef · KL_t."""
    advantages = torch.full(mask.shape, centered_reward, dtype=torch.float64, device=mask.device)
    if kl is not None:
        advantages = advantages - kl_coef * kl.double()
    return torch.where(mask > 0, advantages, 0.0)
