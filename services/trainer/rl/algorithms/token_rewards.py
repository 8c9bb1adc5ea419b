"""Rewards of single tokens: a penalty for leaving the reference policy, and the answer's own reward at its end.

InstructGPT's form (Ouyang et al. 2022, arXiv:2203.02155).
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(reward: float, mask: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Float64 [R] of one response: -kl_coef · KL_t where trained, plus `reward` on the last trained token.

    `mask` [R] is 1 where trained; `kl` [R] or None. Tokens of tools and environments have 0, and so has every token of
    a response that is masked in whole. float32 would round a small KL away beside a large reward.
    """
    trained = mask > 0
    rewards = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if kl is not None:
        rewards = torch.where(trained, -kl_coef * kl.double(), rewards)
    places = trained.nonzero()
    if len(places):
        rewards[places[-1, 0]] += reward
    return rewards
