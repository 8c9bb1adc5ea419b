"""What an algorithm is: rewards of samples, advantages of tokens, and the loss. A new one overrides what it changes.

Each algorithm is one class in a file of this folder; docs/architecture.md has the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, clamp, maximum, minimum, where

from headrace.errors import Internal
from headrace.job.schema.training import TrainSection
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.groups import raw_rewards
from services.trainer.rl.algorithms.numerics import bounded, precise


@dataclass(frozen=True, slots=True)
class ResponseValues:
    """One response, [R] each."""

    reward: float
    """As `Algorithm.rewards` shaped it"""
    mask: Tensor
    """1 where the token is trained"""
    log_probs: Tensor | None
    kl: Tensor | None
    teacher_log_probs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """[B, S] each; the loss has a gradient."""

    loss: Tensor
    clipped: Tensor
    """1 where a clip took effect."""
    log_ratio: Tensor
    """logπ - logπ_old as the loss saw it; no gradient."""


class Algorithm:
    """The policy gradient with PPO's clipped loss, and every token's advantage its response's reward."""

    def __init__(self, config: TrainSection) -> None:
        self.config = config

    def rewards(self, samples: Sequence[SampleFacts]) -> dict[str, float]:
        """By sample_id, for the samples of the whole rollout batch; 0 for those that failed or have no reward."""
        return raw_rewards(samples)

    def advantages(self, response: ResponseValues) -> tuple[Tensor, Tensor]:
        """Advantages and returns of one response, float64 [R] each, before whitening; 0 where not trained."""
        advantages = torch.where(response.mask > 0, response.reward, 0.0).double()
        return advantages, advantages

    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        """The loss of every token from [B, S] each. Gradients flow to `log_probs` alone."""
        loss, clipped = policy_loss(
            log_probs, old_log_probs, advantages, self.config.eps_clip, self.clip_high, self.config.eps_clip_c
        )
        return TokenLoss(loss, clipped, log_probs.detach() - old_log_probs)

    @property
    def clip_high(self) -> float:
        """How far the importance ratio may be above 1."""
        return self.config.eps_clip if self.config.eps_clip_high is None else self.config.eps_clip_high


def require(values: Tensor | None) -> Tensor:
    """The values, for a part of the job that is on only where they are computed: their absence is a bug of ours."""
    if values is None:
        raise Internal("a value that this part of the job trains on was not computed before the step")
    return values


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


def sft_loss(log_probs: Tensor) -> Tensor:
    """-log π of every token, float32 in the shape of `log_probs`: supervised fine-tuning's negative log-likelihood."""
    return -precise(log_probs)
