"""What one micro-batch contributes to the loss, put together from the algorithms by the job's choice.

Shapes: B samples, S positions; every array is aligned with the logits: position t speaks of token t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config.job import TrainSection
from services.trainer.algorithms.kl import kl_estimate
from services.trainer.algorithms.policy_loss import policy_loss
from services.trainer.algorithms.reduction import weighted_sum
from services.trainer.algorithms.sft import sft_loss
from services.trainer.algorithms.tis import importance_weights

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
    "tis_truncated",
    "log_prob_diff",
)


# Means over the trained tokens, by the sum they come from.
MEANS = {
    "entropy": "entropy",
    "ratio": "ratio/mean",
    "clip_fraction": "clip_fraction",
    "tis_weight": "tis_weight/mean",
    "tis_truncated": "tis_weight/truncated",
    "log_prob_diff": "log_prob_diff/mean",
}


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
    def losses(self) -> frozenset[str]:
        """The parts that this loss has."""
        if self._config.loss_type == "sft_loss":
            return frozenset({"loss/sft"})
        parts = {"loss/policy"}
        if self.needs_reference:
            parts.add("loss/kl")
        if self._config.entropy_coef:
            parts.add("loss/entropy")
        return frozenset(parts)

    @property
    def means(self) -> dict[str, str]:
        """Which sums are reported as means over the trained tokens, and under which names."""
        if self._config.loss_type == "sft_loss":
            return {"entropy": "entropy"}
        return {sums: name for sums, name in MEANS.items() if self._config.use_tis or not sums.startswith("tis_")}

    @property
    def needs_reference(self) -> bool:
        """True when the loss has a KL to the reference policy."""
        return self._config.use_kl_loss and self._config.kl_loss_coef > 0 and self._config.loss_type == "policy_loss"

    def __call__(self, terms: Terms) -> Outcome:
        if self._config.loss_type == "sft_loss":
            return self._sft(terms)
        return self._policy(terms)

    def _sft(self, terms: Terms) -> Outcome:
        loss = weighted_sum(sft_loss(terms.log_probs), terms.weights)
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
            "clip_fraction": _masked_sum(clipped, terms.mask),
            "ratio": _masked_sum(torch.exp(current - old), terms.mask),
        }
        if config.use_tis:
            trainer = terms.old_log_probs if terms.old_log_probs is not None else current
            tis = importance_weights(trainer, terms.rollout_log_probs, config.tis_clip_low, config.tis_clip)
            per_token = per_token * tis.weights
            sums["tis_weight"] = _masked_sum(tis.weights, terms.mask)
            sums["tis_truncated"] = _masked_sum(tis.truncated, terms.mask)
        loss = sums["loss/policy"] = weighted_sum(per_token, terms.weights)
        if terms.reference_log_probs is not None:
            kl = kl_estimate(terms.log_probs, terms.reference_log_probs, config.kl_loss_type)
            sums["loss/kl"] = weighted_sum(kl, terms.weights)
            loss = loss + config.kl_loss_coef * sums["loss/kl"]
        if config.entropy_coef:
            sums["loss/entropy"] = weighted_sum(terms.entropy, terms.weights)
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
            "entropy": _masked_sum(terms.entropy.detach(), terms.mask),
            "log_prob_diff": difference.sum(),
        }
        zero = torch.zeros((), device=loss.device)
        vector = torch.stack([sums.get(name, zero).detach().double() for name in SUMS])
        return Outcome(loss, vector, difference.max() if difference.numel() else zero)


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, values, 0.0).sum()
