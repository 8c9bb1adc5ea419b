"""What one micro-batch contributes to the loss, put together from the algorithms by the job's choice.

Shapes: B samples, S positions; every array is aligned with the logits: position t speaks of token t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config.job import TrainSection
from services.trainer.algorithms.kl import kl_divergence
from services.trainer.algorithms.policy_loss import policy_loss
from services.trainer.algorithms.sft import sft_loss
from services.trainer.algorithms.tis import truncated_importance_weights

SUMS = (
    "loss/policy",
    "loss/sft",
    "loss/kl",
    "loss/entropy",
    "tokens",
    "entropy",
    "ratio",
    "clip_fraction",
    "tis_weight",
    "log_prob_diff",
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the objective is computed from. All float32, [B, S] unless said."""

    log_probs: Tensor
    """Of the tokens, under the weights being trained; has a gradient."""
    entropy: Tensor
    mask: Tensor
    """1 where a token is trained."""
    weights: Tensor
    """Each token's share of the global loss; sums to 1 over the whole optimizer step."""
    advantages: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None
    """None: this is the first step on these samples, so the old policy is this one."""
    reference_log_probs: Tensor | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The micro-batch's part of the loss, and of the sums and maxima that are reported."""

    loss: Tensor
    sums: Tensor
    """[len(SUMS)], float64"""
    max_log_prob_diff: Tensor


class Objective:
    """The job's loss."""

    def __init__(self, config: TrainSection) -> None:
        self._config = config

    @property
    def needs_reference(self) -> bool:
        """True when the loss has a KL to the reference policy."""
        return self._config.use_kl_loss and self._config.kl_loss_coef > 0 and self._config.loss_type == "policy_loss"

    def __call__(self, terms: Terms) -> Outcome:
        if self._config.loss_type == "sft_loss":
            return self._sft(terms)
        return self._policy(terms)

    def _sft(self, terms: Terms) -> Outcome:
        loss = (sft_loss(terms.log_probs) * terms.weights).sum()
        return self._outcome(terms, loss, {"loss/sft": loss})

    def _policy(self, terms: Terms) -> Outcome:
        config = self._config
        current = terms.log_probs.detach()
        old = self._old(terms, current)
        per_token, clipped = policy_loss(
            terms.log_probs,
            old,
            terms.advantages,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high if config.eps_clip_high is not None else config.eps_clip,
            eps_clip_c=config.eps_clip_c,
        )
        sums: dict[str, Tensor] = {
            "clip_fraction": (clipped * terms.mask).sum(),
            "ratio": (torch.exp((current - old) * terms.mask) * terms.mask).sum(),
        }
        if config.use_tis:
            trainer = terms.old_log_probs if terms.old_log_probs is not None else current
            tis = truncated_importance_weights(
                trainer * terms.mask,
                terms.rollout_log_probs * terms.mask,
                low=config.tis_clip_low,
                high=config.tis_clip,
            )
            per_token = per_token * tis
            sums["tis_weight"] = (tis * terms.mask).sum()
        loss = sums["loss/policy"] = (per_token * terms.weights).sum()
        if terms.reference_log_probs is not None:
            kl = kl_divergence(terms.log_probs, terms.reference_log_probs, config.kl_loss_type)
            sums["loss/kl"] = (kl * terms.weights).sum()
            loss = loss + config.kl_loss_coef * sums["loss/kl"]
        if config.entropy_coef:
            sums["loss/entropy"] = (terms.entropy * terms.weights).sum()
            loss = loss - config.entropy_coef * sums["loss/entropy"]
        return self._outcome(terms, loss, sums)

    def _old(self, terms: Terms, current: Tensor) -> Tensor:
        if self._config.use_rollout_logprobs:
            return terms.rollout_log_probs
        return current if terms.old_log_probs is None else terms.old_log_probs

    def _outcome(self, terms: Terms, loss: Tensor, sums: dict[str, Tensor]) -> Outcome:
        before = terms.old_log_probs if terms.old_log_probs is not None else terms.log_probs.detach()
        difference = (before - terms.rollout_log_probs).abs() * terms.mask
        sums = sums | {
            "tokens": terms.mask.sum(),
            "entropy": (terms.entropy.detach() * terms.mask).sum(),
            "log_prob_diff": difference.sum(),
        }
        zero = torch.zeros((), device=loss.device)
        vector = torch.stack([sums.get(name, zero).detach().double() for name in SUMS])
        return Outcome(loss, vector, difference.max() if difference.numel() else zero)
