"""One micro-batch's contribution to the loss, put together from the algorithms by the job's choice."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.job.schema.training import TrainSection
from services.trainer.metrics.token_statistics import MAXIMA, SUMS, reported
from services.trainer.rl.algorithms.kl import kl_estimate, unbiased_kl_estimate
from services.trainer.rl.algorithms.mismatch import mismatch
from services.trainer.rl.algorithms.precision import bounded
from services.trainer.rl.algorithms.reduction import weighted_sum
from services.trainer.rl.algorithms.sft import sft_loss
from services.trainer.rl.corrections import Correction, choose_corrections
from services.trainer.rl.custom_loss import CustomLoss, PolicyReducer
from services.trainer.rl.loss import Disagreement, LossInputs, LossOutputs, masked_max, masked_sum
from services.trainer.rl.policy_losses import choose_policy_loss


class Objective:
    """The job's loss of a micro-batch, with what is reported of it."""

    def __init__(
        self,
        config: TrainSection,
        *,
        custom_loss: CustomLoss | None = None,
        custom_correction: Correction | None = None,
        reducer: PolicyReducer | None = None,
    ) -> None:
        self._config = config
        self._policy_loss = choose_policy_loss(config)
        self._corrections = choose_corrections(config, custom_correction)
        self._custom_loss = custom_loss
        self._reducer = reducer
        self.reported = reported(config, has_custom_tis=custom_correction is not None)
        self.has_hooks = custom_loss is not None or custom_correction is not None
        self.needs_logits = custom_loss is not None

    @property
    def losses(self) -> frozenset[str]:
        """The parts that this loss has."""
        if self._custom_loss is not None:
            return frozenset({"loss/custom"})
        if self._config.loss_type == "sft_loss":
            return frozenset({"loss/sft"})
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

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        if self._custom_loss is not None:
            loss, log = self._custom_loss(inputs)
            return _outputs(inputs, loss, {"loss/custom": loss}, hooks=log)
        if self._config.loss_type == "sft_loss":
            loss = weighted_sum(sft_loss(inputs.log_probs), inputs.micro.weights)
            return _outputs(inputs, loss, {"loss/sft": loss})
        return self._policy(inputs)

    def _policy(self, inputs: LossInputs) -> LossOutputs:
        config, micro = self._config, inputs.micro
        old = micro.rollout_log_probs if config.use_rollout_logprobs else inputs.trainer_log_probs
        found = self._policy_loss(inputs, old)
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
            **mismatch(inputs.trainer_log_probs, micro.rollout_log_probs, micro.mask),
        }
        per_token = found.loss
        for correct in self._corrections:
            corrected = correct(inputs, old, per_token)
            per_token = corrected.loss
            sums |= corrected.sums
            largest |= corrected.largest
            hooks |= corrected.hooks
        reduce = weighted_sum if self._reducer is None else self._reducer.of(micro)
        loss = sums["loss/policy"] = reduce(per_token, micro.weights)
        if self.has_kl and inputs.reference_log_probs is not None:
            sums["loss/kl"] = weighted_sum(self._kl(inputs, old, inputs.reference_log_probs), micro.weights)
            loss = loss + config.kl_loss_coef * sums["loss/kl"]
        if config.entropy_coef:
            sums["loss/entropy"] = weighted_sum(inputs.entropy, micro.weights)
            loss = loss - config.entropy_coef * sums["loss/entropy"]
        return _outputs(inputs, loss, sums, largest, hooks)

    def _kl(self, inputs: LossInputs, old: Tensor, reference: Tensor) -> Tensor:
        if self._config.use_unbiased_kl:
            return unbiased_kl_estimate(inputs.log_probs, old, reference, self._config.kl_loss_type)
        return kl_estimate(inputs.log_probs, reference, self._config.kl_loss_type)


def _outputs(
    inputs: LossInputs,
    loss: Tensor,
    sums: Mapping[str, Tensor],
    largest: Mapping[str, Tensor] | None = None,
    hooks: Mapping[str, Tensor] | None = None,
) -> LossOutputs:
    micro = inputs.micro
    everything = {
        "tokens": micro.mask.sum(),
        "entropy": masked_sum(inputs.entropy.detach(), micro.mask),
        "log_prob_diff": masked_sum((inputs.trainer_log_probs - micro.rollout_log_probs).abs(), micro.mask),
        **sums,
    }
    zero = torch.zeros((), device=loss.device)
    vector, maxima = (
        torch.stack([values.get(name, zero).detach().double() for name in names])
        for values, names in ((everything, SUMS), (largest or {}, MAXIMA))
    )
    return LossOutputs(loss, vector, maxima, Disagreement.worst(inputs), hooks or {})
