"""A loss's inputs and outputs for one micro-batch; policy-gradient losses; a user's own loss, with slime's arguments.

Every array is [B, S]: one response a row, column t speaks of its token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.trainer import trainer_hook
from services.trainer.rl.algorithms.numerics import weighted_sum
from services.trainer.rl.hooks import of_samples
from services.trainer.rl.inputs import MicroInputs


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The inputs of the objective. All float32, [B, S] unless said."""

    micro: MicroInputs
    log_probs: Tensor
    """The tokens' log-probs under the weights being trained; has a gradient."""
    entropy: Tensor
    old_log_probs: Tensor | None
    """None: this is the first step on these samples, so the old policy is this one."""
    reference_log_probs: Tensor | None
    logits: Tensor | None = None
    """[B, S, V / tp], where the objective asks for them."""

    @property
    def trainer_log_probs(self) -> Tensor:
        """The trainer's own log-probs of the policy that this rollout step started from; no gradient."""
        return self.log_probs.detach() if self.old_log_probs is None else self.old_log_probs


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
        "ref_log_probs": None if inputs.reference_log_probs is None else cut(inputs.reference_log_probs),
        "current_log_probs": cut(inputs.log_probs),
        "entropy": cut(inputs.entropy),
    }
