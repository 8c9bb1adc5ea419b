"""One micro-batch's contribution to the loss, put together from the algorithms by the job's choice.

Samples that are not the current policy's are corrected per token: TIS, MIS, OPSM, a user's correction. A user's own
loss has slime's arguments. Every array is [B, S]: one response a row, column t speaks of its token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.trainer import trainer_hook
from headrace.job.schema.training import TrainSection
from services.trainer.metrics import MAXIMA, SUMS, reported
from services.trainer.rl.algorithms.algorithm import sft_loss
from services.trainer.rl.algorithms.kl import kl_estimate, unbiased_kl_estimate
from services.trainer.rl.algorithms.mis import (
    ImportanceWeights,
    importance_ratio,
    mis_weights,
    mismatch,
    not_vetoed,
    opsm_mask,
    within,
)
from services.trainer.rl.algorithms.numerics import bounded, weighted_sum
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.hooks import of_samples, per_token
from services.trainer.rl.inputs import MicroInputs


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The inputs of the objective. All float32, [B, S] unless said."""

    micro: MicroInputs
    log_probs: Tensor
    """The tokens' log-probs under the weights being trained; has a gradient."""
    entropy: Tensor
    logits: Tensor | None = None
    """[B, S, V / tp], where the objective asks for them."""

    @property
    def trainer_log_probs(self) -> Tensor:
        """The trainer's own log-probs of the policy that this rollout step started from; no gradient."""
        old = self.micro.old_log_probs
        return self.log_probs.detach() if old is None else old


@dataclass(frozen=True, slots=True, eq=False)
class Disagreement:
    """The token on which trainer and engine differ most: both log-probs, and how far they are apart."""

    gap: Tensor
    trainer: Tensor
    engine: Tensor

    @classmethod
    def worst(cls, inputs: LossInputs) -> Disagreement:
        """The worst of the trained tokens; zeros without one."""
        micro = inputs.micro
        gaps = ((inputs.trainer_log_probs - micro.rollout_log_probs).abs() * micro.mask).flatten()
        if not gaps.numel():
            zero = torch.zeros((), device=gaps.device)
            return cls(zero, zero, zero)
        place = gaps.argmax()
        return cls(gaps[place], inputs.trainer_log_probs.flatten()[place], micro.rollout_log_probs.flatten()[place])


@dataclass(frozen=True, slots=True, eq=False)
class LossOutputs:
    """The micro-batch's part of the loss, and of what is reported."""

    loss: Tensor
    sums: Tensor
    """float64 [len(SUMS)], in the order of SUMS"""
    largest: Tensor
    """float64 [len(MAXIMA)], in the order of MAXIMA"""
    worst: Disagreement
    hooks: Mapping[str, Tensor] = field(default_factory=dict)
    """What users' functions report, as shares of the step's value"""


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The largest over masked-in tokens, of what is not negative; 0 without a token."""
    kept = torch.where(mask > 0, values, 0.0)
    return kept.max() if kept.numel() else kept.new_zeros(())


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ over masked-in tokens; what is not finite elsewhere does not count."""
    return torch.where(mask > 0, values, 0.0).sum()


class CustomLoss:
    """`f(args, batch, logits, sum_of_sample_mean) -> (loss, log)`: the loss of the micro-batch.

    The loss is summed over samples, and so are the numbers of the log, which are reported. Beyond slime's keys the
    batch has `current_log_probs` and `entropy`, computed from the logits, with their gradients.
    """

    def __init__(self, path: str, args: HookArgs) -> None:
        self._path = path
        self._hook = trainer_hook(path, "loss").target
        self._args = args

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """A share of the step's loss, and of each number of the log, as scalars."""
        micro = inputs.micro
        if not micro.samples:
            return weighted_sum(inputs.log_probs, micro.weights), {}

        def sum_of_sample_mean(flat: Tensor) -> Tensor:
            lengths = [sample.response_length for sample in micro.samples]
            return weighted_sum(micro.put(torch.split(flat, lengths)), micro.weights) * micro.loss_scale

        before = _version(inputs.logits)
        found = self._hook(self._args, _batch(inputs), inputs.logits, sum_of_sample_mean)
        loss, log = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(log, dict):
            raise InvalidArgument(f"hook {self._path} must return (loss, log): a tensor of one number, and a dict")
        self._check(loss, inputs, before)
        # A loss that touches no logits still has to run backward with those of the other ranks.
        share = loss.squeeze() / micro.loss_scale + weighted_sum(inputs.log_probs, torch.zeros_like(micro.weights))
        return share, {
            f"loss/custom/{name}": self._number(name, value) / micro.loss_scale for name, value in log.items()
        }

    def _check(self, loss: Tensor, inputs: LossInputs, logits_before: int) -> None:
        if not torch.isfinite(loss).all():
            raise InvalidArgument(f"hook {self._path} returned a loss of {loss.item()}, must be finite")
        if _version(inputs.logits) != logits_before:
            raise InvalidArgument(
                f"hook {self._path} has written into the logits, which are too large to be copied for it: leave them "
                "as they are"
            )
        sources = [tensor for tensor in (inputs.log_probs, inputs.entropy, inputs.logits) if tensor is not None]
        if inputs.micro.mask.any() and not has_gradient(loss, sources):
            raise InvalidArgument(
                f"hook {self._path} returned a loss without a gradient, which trains nothing: compute it from the "
                "logits, or from batch['current_log_probs'] or batch['entropy'], and detach none of it"
            )

    def _number(self, name: str, value: object) -> Tensor:
        if isinstance(value, int | float):
            return torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InvalidArgument(f"hook {self._path}: log[{name!r}] must be one number")
        return value.detach().float().squeeze()


def has_gradient(loss: Tensor, sources: Sequence[Tensor]) -> bool:
    """True when a gradient of the loss reaches one of them, or when none of them has one."""
    wanted = [source.grad_fn for source in sources if source.grad_fn is not None]
    seen, front = set(), [loss.grad_fn]
    while front:
        node = front.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return True
        seen.add(node)
        front += [following for following, _ in node.next_functions]
    return not wanted


def _version(tensor: Tensor | None) -> int:
    """Goes up whenever the tensor is written into."""
    return 0 if tensor is None else tensor._version


class PolicyReducer:
    """`f(total_lengths, response_lengths, loss_masks, per_token) -> reducer` for the policy's part of the loss."""

    def __init__(self, path: str, *, per_token: bool) -> None:
        self._path = path
        self._hook = trainer_hook(path, "reducer").target
        self._per_token = per_token

    def of(self, micro: MicroInputs) -> Callable[[Tensor, Tensor], Tensor]:
        """A function in the place of `weighted_sum`, for this micro-batch."""

        def reduce(per_token: Tensor, weights: Tensor) -> Tensor:
            if not micro.samples:
                return weighted_sum(per_token, weights)
            facts = of_samples(micro.samples)
            masks = micro.copies(micro.mask)
            lengths = [len(mask) for mask in masks]
            reducer = self._hook(facts["total_lengths"], lengths, masks, self._per_token)
            found = reducer(torch.cat(micro.cut(per_token)))
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise InvalidArgument(f"hook {self._path}: its reducer must return a tensor of one number")
            if not torch.isfinite(found).all() or (micro.mask.any() and not has_gradient(found, [per_token])):
                raise InvalidArgument(
                    f"hook {self._path}: its reducer returned {found.item()}, must be finite and have the gradient of "
                    "the losses it was given"
                )
            return found.squeeze() / micro.loss_scale

        return reduce


def _batch(inputs: LossInputs) -> dict[str, Any]:
    micro = inputs.micro
    cut = micro.copies
    facts = of_samples(micro.samples)
    return facts | {
        "unconcat_tokens": facts["tokens"],
        "loss_masks": cut(micro.mask),
        "advantages": cut(micro.advantages),
        "returns": cut(micro.returns),
        "rollout_log_probs": cut(micro.rollout_log_probs),
        "log_probs": cut(inputs.trainer_log_probs),
        "ref_log_probs": None if micro.reference_log_probs is None else cut(micro.reference_log_probs),
        "current_log_probs": cut(inputs.log_probs),
        "entropy": cut(inputs.entropy),
    }


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
        found.append(partial(_opsm, config))
    if config.use_tis:
        found.append(user_weights or partial(_weighted, config))
    if config.use_rs:
        found.append(partial(_rejected, config))
    return found


def _opsm(config: TrainSection, inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
    micro = inputs.micro
    kept = opsm_mask(inputs.log_probs, old, micro.advantages, micro.mask, config.opsm_delta)
    return Corrected(loss * kept, {"opsm_masked": masked_sum(1.0 - kept, micro.mask)})


def _weighted(config: TrainSection, inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
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


def weights_of(config: TrainSection, micro: MicroInputs, trainer_log_probs: Tensor) -> ImportanceWeights:
    """The job's importance weights, not normalized."""
    low, high = config.weight_bounds
    engine = micro.rollout_log_probs
    return mis_weights(trainer_log_probs, engine, micro.mask, config.tis_level, low, high, config.tis_mode)


def _rejected(config: TrainSection, inputs: LossInputs, old: Tensor, loss: Tensor) -> Corrected:
    trainer, micro = inputs.trainer_log_probs, inputs.micro
    ratio = importance_ratio(trainer, micro.rollout_log_probs, micro.mask, config.rs_level)
    kept, veto = within(ratio, *config.rejection_bounds), torch.zeros_like(micro.mask)
    if config.rs_veto_threshold is not None:
        veto = 1.0 - not_vetoed(trainer, micro.rollout_log_probs, micro.mask, config.rs_veto_threshold)
    sums = {"rs_rejected": masked_sum(1.0 - kept, micro.mask), "rs_vetoed": masked_sum(veto, micro.mask)}
    return Corrected(torch.where((kept > 0) & (veto == 0), loss, 0.0), sums)


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
        if micro.kept is not None:
            sums["kept_tokens"] = masked_sum(micro.kept.counts(micro.mask.numel()).view_as(micro.mask), micro.mask)
        if micro.outside is not None:
            sums["outside_mask"] = masked_sum(micro.outside, micro.mask)
        per_token = found.loss
        for correct in self._corrections:
            corrected = correct(inputs, old, per_token)
            per_token = corrected.loss
            sums |= corrected.sums
            largest |= corrected.largest
            hooks |= corrected.hooks
        reduce = weighted_sum if self._reducer is None else self._reducer.of(micro)
        loss = sums["loss/policy"] = reduce(per_token, micro.weights)
        if self.has_kl and micro.reference_log_probs is not None:
            sums["loss/kl"] = weighted_sum(self._kl(inputs, old, micro.reference_log_probs), micro.weights)
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
