"""What one micro-batch contributes to the loss, put together from the algorithms by the job's choice."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.job.schema.job import Job
from services.trainer.metrics.token_statistics import MAXIMA, SUMS, reported
from services.trainer.rl.algorithms.kl import kl_estimate, unbiased_kl_estimate
from services.trainer.rl.algorithms.mismatch import mismatch
from services.trainer.rl.algorithms.precision import bounded
from services.trainer.rl.algorithms.reduction import weighted_sum
from services.trainer.rl.algorithms.sft import sft_loss
from services.trainer.rl.corrections import choose_corrections
from services.trainer.rl.custom_loss import CustomLoss, PolicyReducer
from services.trainer.rl.policy_losses import choose_policy_loss
from services.trainer.rl.terms import Disagreement, Outcome, Terms, masked_max, masked_sum


class Objective:
    """The job's loss."""

    def __init__(self, job: Job) -> None:
        self._config = job.train
        self._policy_loss = choose_policy_loss(job.train)
        self._corrections = choose_corrections(job)
        self._custom_loss = CustomLoss(job) if job.train.loss_type == "custom_loss" else None
        path = job.hooks.custom_pg_loss_reducer_function_path
        self._reducer = PolicyReducer(path, job.train) if path else None
        self.reported = reported(job)
        self.has_hooks = self._custom_loss is not None or job.hooks.custom_tis_function_path is not None
        self.needs_logits = job.train.loss_type == "custom_loss"

    @property
    def losses(self) -> frozenset[str]:
        """The parts that this loss has."""
        match self._config.loss_type:
            case "sft_loss":
                return frozenset({"loss/sft"})
            case "custom_loss":
                return frozenset({"loss/custom"})
        parts = {"loss/policy"}
        if self.has_kl:
            parts.add("loss/kl")
        if self._config.entropy_coef:
            parts.add("loss/entropy")
        return frozenset(parts)

    @property
    def has_kl(self) -> bool:
        """True when the loss has a KL to the reference policy."""
        return self._config.use_kl_loss and self._config.kl_loss_coef > 0 and self._config.loss_type == "policy_loss"

    def __call__(self, terms: Terms) -> Outcome:
        match self._config.loss_type:
            case "sft_loss":
                loss = weighted_sum(sft_loss(terms.log_probs), terms.micro.weights)
                return _outcome(terms, loss, {"loss/sft": loss})
            case "custom_loss":
                assert self._custom_loss is not None
                loss, log = self._custom_loss(terms)
                return _outcome(terms, loss, {"loss/custom": loss}, hooks=log)
            case "policy_loss":
                return self._policy(terms)

    def _policy(self, terms: Terms) -> Outcome:
        config, micro = self._config, terms.micro
        old = micro.rollout_log_probs if config.use_rollout_logprobs else terms.trainer_log_probs
        found = self._policy_loss(terms, old)
        ratio = bounded(found.log_ratio).exp()
        largest = {"ratio/max": masked_max(ratio, micro.mask)}
        hooks: dict[str, Tensor] = {}
        sums = {
            "clip_fraction": masked_sum(found.clipped, micro.mask),
            "clipped_low": masked_sum(found.clipped * (micro.advantages < 0), micro.mask),
            "clipped_high": masked_sum(found.clipped * (micro.advantages > 0), micro.mask),
            "ratio": masked_sum(ratio, micro.mask),
            "ratio_squared": masked_sum((ratio - 1.0).square(), micro.mask),
            "ppo_kl": masked_sum(-found.log_ratio, micro.mask),
            **mismatch(terms.trainer_log_probs, micro.rollout_log_probs, micro.mask),
        }
        per_token = found.loss
        for correct in self._corrections:
            corrected = correct(terms, old, per_token)
            per_token = corrected.loss
            sums |= corrected.sums
            largest |= corrected.largest
            hooks |= corrected.hooks
        reduce = weighted_sum if self._reducer is None else self._reducer.of(micro)
        loss = sums["loss/policy"] = reduce(per_token, micro.weights)
        if self.has_kl and terms.reference_log_probs is not None:
            sums["loss/kl"] = weighted_sum(self._kl(terms, old, terms.reference_log_probs), micro.weights)
            loss = loss + config.kl_loss_coef * sums["loss/kl"]
        if config.entropy_coef:
            sums["loss/entropy"] = weighted_sum(terms.entropy, micro.weights)
            loss = loss - config.entropy_coef * sums["loss/entropy"]
        return _outcome(terms, loss, sums, largest, hooks)

    def _kl(self, terms: Terms, old: Tensor, reference: Tensor) -> Tensor:
        if self._config.use_unbiased_kl:
            return unbiased_kl_estimate(terms.log_probs, old, reference, self._config.kl_loss_type)
        return kl_estimate(terms.log_probs, reference, self._config.kl_loss_type)


def _outcome(
    terms: Terms,
    loss: Tensor,
    sums: Mapping[str, Tensor],
    largest: Mapping[str, Tensor] | None = None,
    hooks: Mapping[str, Tensor] | None = None,
) -> Outcome:
    micro = terms.micro
    everything = {
        "tokens": micro.mask.sum(),
        "entropy": masked_sum(terms.entropy.detach(), micro.mask),
        "log_prob_diff": masked_sum((terms.trainer_log_probs - micro.rollout_log_probs).abs(), micro.mask),
        **sums,
    }
    zero = torch.zeros((), device=loss.device)
    vector, maxima = (
        torch.stack([values.get(name, zero).detach().double() for name in names])
        for values, names in ((everything, SUMS), (largest or {}, MAXIMA))
    )
    return Outcome(loss, vector, maxima, Disagreement.worst(terms), hooks or {})
