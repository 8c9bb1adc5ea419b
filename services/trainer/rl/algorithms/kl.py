"""KL to a reference policy: its estimators per token, and rewards and advantages with a penalty for leaving one.

Estimators: Schulman, http://joschu.net/blog/kl-approx.html. Token rewards are that penalty and the response's own
reward at its end, in InstructGPT's form (Ouyang et al. 2022, arXiv:2203.02155).
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from services.trainer.rl.algorithms.numerics import bounded, precise

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

KL_LIMIT = 10.0


def unbiased_kl_estimate(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kl_type: KlType) -> Tensor:
    """π/π_old times the estimate: unbiased for samples of the old policy (DeepSeek-V3.2, arXiv:2512.02556).

    Of low_var_kl the product is within ±10. Gradients flow through the ratio too.
    """
    ratio = bounded(precise(log_probs) - precise(old_log_probs.detach())).exp()
    if kl_type == "low_var_kl":
        return (ratio * kl_estimate(log_probs, ref_log_probs, "k3")).clamp(-KL_LIMIT, KL_LIMIT)
    return ratio * kl_estimate(log_probs, ref_log_probs, kl_type)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kl_type: KlType) -> Tensor:
    """Float32 estimate of KL(policy, reference) for every token, in the shape of `log_probs`.

    With d = log_probs - ref_log_probs: k1 = d; k2 = d² / 2; k3 = exp(-d) - 1 + d; low_var_kl is k3 within ±10.
    Gradients flow to `log_probs` alone.
    """
    d = precise(log_probs) - precise(ref_log_probs.detach())
    match kl_type:
        case "k1":
            return d
        case "k2":
            return d * d / 2.0
        case "k3":
            return _k3(d)
        case "low_var_kl":
            return _k3(d).clamp(-KL_LIMIT, KL_LIMIT)
        case _:
            assert_never(kl_type)


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(-d) - 1 loses where the policies agree.
    return (-bounded(d)).expm1() + d


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


def distilled_advantages(
    advantages: Tensor, log_probs: Tensor, teacher_log_probs: Tensor, opd_kl_coef: float
) -> Tensor:
    """A - opd_kl_coef · (logπ - logπ_teacher), float32 [R] from [R] each; no gradient.

    On-policy distillation: the student's reward is its teacher's log-probs of the student's own tokens (Agarwal et al.
    2024, arXiv:2306.13649; as an advantage: Thinking Machines 2025, "On-Policy Distillation").
    """
    reverse_kl = precise(log_probs.detach()) - precise(teacher_log_probs)
    return precise(advantages) - opd_kl_coef * reverse_kl
