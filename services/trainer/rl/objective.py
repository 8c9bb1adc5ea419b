"""One micro-batch's contribution to the loss, put together from the algorithms by the job's choice.

Samples that are not the current policy's are corrected per token: TIS, MIS, OPSM, a user's correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.trainer import trainer_hook
from headrace.job.schema.training import TrainSection
from services.trainer.metrics import MAXIMA, SUMS, reported
from services.trainer.rl.algorithms.kl import kl_estimate, unbiased_kl_estimate
from services.trainer.rl.algorithms.mis import (
    ImportanceWeights,
    importance_ratio,
    mis_weights,
    mismatch,
    not_vetoed,
    within,
)
from services.trainer.rl.algorithms.numerics import bounded, weighted_sum
from services.trainer.rl.algorithms.opsm import opsm_mask
from services.trainer.rl.algorithms.sft import sft_loss
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.hooks import of_samples, per_token
from services.trainer.rl.inputs import MicroInputs
from services.trainer.rl.loss import (
    CustomLoss,
    Disagreement,
    LossInputs,
    LossOutputs,
    PolicyReducer,
    masked_max,
    masked_sum,
)


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """The loss per token, and what is to be reported."""

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums over the trained tokens, by name"""
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    """The largest values among the trained tokens, by name"""
    hooks: Mapping[str, Tensor] = field(default_factory=dict)
    """What a user's function reports, by name: shares of the step's value"""


Correction = Callable[[LossInputs, Tensor, Tensor], Corrected]
"""Takes the inputs, the old policy's log-probs and the loss per token."""


def choose_corrections(config: TrainSection, user_weights: Correction | None) -> list[Correction]:
    """The corrections of a job in the order in which they apply; `user_weights` stand in the place of TIS."""
    found: list[Correction] = []
    if config.use_opsm:
        found.append(_opsm(config.opsm_delta))
    if config.use_tis:
        found.append(user_weights or _weighted(config))
    if config.use_rs:
        found.append(_rejected(config))
    return found


def _opsm(delta: float) -> Correction:
    def correct(inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
        micro = inputs.micro
        kept = opsm_mask(inputs.log_probs, old, micro.advantages, micro.mask, delta)
        return Corrected(loss * kept, {"opsm_masked": masked_sum(1.0 - kept, micro.mask)})

    return correct


def _weighted(config: TrainSection) -> Correction:
    def correct(inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
        found = weights_of(config, inputs.micro, inputs.trainer_log_probs)
        sums = {
            "tis_weight": masked_sum(found.weights, inputs.micro.mask),
            "tis_weight_squared": masked_sum((found.weights - 1.0).square(), inputs.micro.mask),
            "tis_truncated": masked_sum(found.truncated, inputs.micro.mask),
        }
        # Where the weight is 0 the token is out, even when its loss is infinite.
        weighted = torch.where(found.weights > 0, loss, 0.0) * found.weights
        return Corrected(
            weighted / inputs.micro.mean_weight, sums, {"tis_weight/max": masked_max(found.weights, inputs.micro.mask)}
        )

    return correct


def weights_of(config: TrainSection, micro: MicroInputs, trainer_log_probs: Tensor) -> ImportanceWeights:
    """The job's importance weights, not normalized."""
    low, high = config.weight_bounds
    engine = micro.rollout_log_probs
    return mis_weights(trainer_log_probs, engine, micro.mask, config.tis_level, low, high, config.tis_mode)


def _rejected(config: TrainSection) -> Correction:
    def correct(inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
        trainer, micro = inputs.trainer_log_probs, inputs.micro
        ratio = importance_ratio(trainer, micro.rollout_log_probs, micro.mask, config.rs_level)
        kept, veto = within(ratio, *config.rejection_bounds), torch.zeros_like(micro.mask)
        if config.rs_veto_threshold is not None:
            veto = 1.0 - not_vetoed(trainer, micro.rollout_log_probs, micro.mask, config.rs_veto_threshold)
        sums = {"rs_rejected": masked_sum(1.0 - kept, micro.mask), "rs_vetoed": masked_sum(veto, micro.mask)}
        return Corrected(torch.where((kept > 0) & (veto == 0), loss, 0.0), sums)

    return correct


def custom_correction(path: str, args: HookArgs) -> Correction:
    """A user's `f(args, *, pg_loss, train_log_probs, ...) -> (pg_loss, loss_masks, metrics)`."""
    hook = trainer_hook(path, "tis").target

    def correct(inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
        micro = inputs.micro
        if not micro.samples:
            return Corrected(loss)
        masks = micro.copies(micro.mask)
        facts = of_samples(micro.samples)
        found = hook(
            args,
            pg_loss=torch.cat(micro.cut(loss)),
            train_log_probs=micro.copies(inputs.trainer_log_probs),
            rollout_log_probs=micro.copies(micro.rollout_log_probs),
            loss_masks=masks,
            total_lengths=facts["total_lengths"],
            response_lengths=[len(mask) for mask in masks],
            metadata=facts["metadata"],
        )
        if not isinstance(found, tuple) or len(found) != 3:
            raise InvalidArgument(f"hook {path} must return (pg_loss, loss_masks, metrics)")
        corrected, kept, metrics = found
        lengths = [sample.response_length for sample in micro.samples]
        if not isinstance(corrected, Tensor) or corrected.shape != (sum(lengths),):
            raise InvalidArgument(f"hook {path} must return pg_loss as a tensor [{sum(lengths)}], one loss a token")
        kept = per_token(f"loss_masks of {path}", kept, lengths)
        if any(((mask < 0) | (mask > 1)).any() for mask in kept):
            raise InvalidArgument(f"hook {path} must return loss_masks of 0 to 1")
        trained = torch.cat(micro.cut(micro.mask)) * torch.cat(kept) > 0
        if not torch.isfinite(corrected[trained]).all():
            raise InvalidArgument(f"hook {path} returned a pg_loss that is not finite for a token that is trained")
        parts = [part * mask for part, mask in zip(torch.split(corrected, lengths), kept, strict=True)]
        return Corrected(micro.put(parts), hooks=_reported(path, metrics, micro))

    return correct


def _reported(path: str, metrics: object, micro: MicroInputs) -> dict[str, Tensor]:
    """The means of what the hook returned for every token, reduced as the loss is."""
    lengths = [sample.response_length for sample in micro.samples]
    if not isinstance(metrics, dict):
        raise InvalidArgument(f"hook {path} must return its metrics as a dict, not as {type(metrics).__name__}")
    for name, values in metrics.items():
        if not isinstance(values, Tensor) or values.shape != (sum(lengths),):
            raise InvalidArgument(f"hook {path}: metric {name!r} must be a tensor [{sum(lengths)}], one number a token")
    return {
        f"tis/{name}": weighted_sum(micro.put(torch.split(values.detach().float(), lengths)), micro.weights)
        for name, values in metrics.items()
    }


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
        self._algorithm = algorithm(config)
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
        found = self._algorithm.loss(inputs.log_probs, old, micro.advantages, micro.mask)
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
