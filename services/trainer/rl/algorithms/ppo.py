"""PPO: the clipped policy loss, generalized advantages, and the critic's clipped loss.

Policy loss: Schulman et al. 2017, arXiv:1707.06347; other estimators are trained with it, too. Advantages: Schulman et
al. 2016, arXiv:1506.02438. The critic's squared error: PPO's public implementation (Huang et al. 2022, detail 9).
"""

from __future__ import annotations

import torch
from torch import Tensor, clamp, maximum, minimum, where

from services.trainer.rl.algorithms.numerics import bounded, discounted_sums, precise


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
