"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.rl.algorithms.discount import discounted_sums


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one response, float64 [R] each from [R] each.

    Over the trained tokens alone, in order: δ_t = r_t + γ V_{t+1} - V_t with V = 0 after the last one,
    A_t = δ_t + γλ A_{t+1}, returns A + V. What a tool or an environment wrote is no action: it is stepped over, and has
    advantage and return 0.
    """
    trained = mask > 0
    v = values.detach().double()[trained]
    following = torch.cat((v[1:], v.new_zeros(min(1, len(v)))))
    found = discounted_sums(rewards[trained] + gamma * following - v, gamma * lambd)
    advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    returns = advantages.clone()
    advantages[trained], returns[trained] = found, found + v
    return advantages, returns
