"""A loss's inputs and its outputs, for one micro-batch.

Every array is [B, S]: one response a row, column t speaks of its token t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
