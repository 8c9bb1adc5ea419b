"""REINFORCE++: discounted returns of token rewards, whitened over the batch (Hu et al. 2025, arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.algorithm import Algorithm, ResponseValues
from services.trainer.rl.algorithms.grpo import grpo_rewards
from services.trainer.rl.algorithms.kl import token_rewards
from services.trainer.rl.algorithms.numerics import discounted_sums


class ReinforcePlusPlus(Algorithm):
    """Advantages are discounted returns, with the KL in the reward of each token."""

    def advantages(self, response: ResponseValues) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(response.reward, response.mask, response.kl, self.config.kl_coef)
        returns = reinforce_plus_plus(rewards, response.mask, gamma=self.config.gamma)
        return returns, returns


class ReinforcePlusPlusBaseline(Algorithm):
    """The group's mean is the baseline."""

    def rewards(self, samples: Sequence[SampleFacts]) -> dict[str, float]:
        return grpo_rewards(samples, divide_by_std=False)

    def advantages(self, response: ResponseValues) -> tuple[Tensor, Tensor]:
        found = reinforce_plus_plus_baseline(response.reward, response.mask, response.kl, self.config.kl_coef)
        return found, found


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
