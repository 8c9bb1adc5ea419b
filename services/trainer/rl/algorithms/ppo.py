"""PPO: the clipped policy loss (of `Algorithm`), generalized advantages, and the critic's clipped loss.

Policy loss: Schulman et al. 2017, arXiv:1707.06347. Advantages: Schulman et al. 2016, arXiv:1506.02438. The critic's
squared error: PPO's public implementation (Huang et al. 2022, detail 9).
"""

from __future__ import annotations

import torch
from torch import Tensor, maximum

from services.trainer.rl.algorithms.algorithm import Algorithm, ResponseValues, require
from services.trainer.rl.algorithms.kl import token_rewards
from services.trainer.rl.algorithms.numerics import discounted_sums, precise


class Ppo(Algorithm):
    """Advantages of a critic that is trained beside the policy."""

    def advantages(self, response: ResponseValues) -> tuple[Tensor, Tensor]:
        config = self.config
        rewards = token_rewards(response.reward, response.mask, response.kl, config.kl_coef)
        return gae(rewards, require(response.values), response.mask, gamma=config.gamma, lambd=config.lambd)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Loss and 0/1 indicator of clipping, float32 in the shape given.

    max((V - G)², (clip(V, V_old ± value_clip) - G)²) with the values before this rollout step's updates as
    V_old. Gradients flow to `values` alone.
    """
    values, old_values, returns = precise(values), precise(old_values.detach()), precise(returns.detach())
    free = (values - returns) ** 2
    bounded = (values.clamp(old_values - value_clip, old_values + value_clip) - returns) ** 2
    return maximum(free, bounded), (bounded > free).float()


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
