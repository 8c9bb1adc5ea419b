"""The family of policy-gradient losses: from log-probs and advantages to a loss for every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.job.schema.training import TrainSection
from services.trainer.rl.algorithms.cispo import cispo_loss
from services.trainer.rl.algorithms.gspo import sequence_log_ratio
from services.trainer.rl.algorithms.policy_loss import policy_loss
from services.trainer.rl.loss import LossInputs


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """[B, S] each; the loss has a gradient."""

    loss: Tensor
    clipped: Tensor
    """1 where a clip took effect."""
    log_ratio: Tensor
    """logπ - logπ_old as the loss saw it; no gradient."""


PolicyLoss = Callable[[LossInputs, Tensor], TokenLoss]


def choose_policy_loss(config: TrainSection) -> PolicyLoss:
    """The loss of the job's estimator, given the inputs and the old policy's log-probs."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high

    def clipped_ratio(inputs: LossInputs, old: Tensor) -> TokenLoss:
        loss, clipped = policy_loss(
            inputs.log_probs, old, inputs.micro.advantages, config.eps_clip, high, config.eps_clip_c
        )
        return TokenLoss(loss, clipped, inputs.log_probs.detach() - old)

    def gspo(inputs: LossInputs, old: Tensor) -> TokenLoss:
        log_ratio = sequence_log_ratio(inputs.log_probs, old, inputs.micro.mask)
        zeros = torch.zeros_like(log_ratio)
        loss, clipped = policy_loss(log_ratio, zeros, inputs.micro.advantages, config.eps_clip, high, config.eps_clip_c)
        return TokenLoss(loss, clipped, log_ratio.detach())

    def cispo(inputs: LossInputs, old: Tensor) -> TokenLoss:
        loss, clipped = cispo_loss(inputs.log_probs, old, inputs.micro.advantages, config.eps_clip, high)
        return TokenLoss(loss, clipped, inputs.log_probs.detach() - old)

    match config.advantage_estimator:
        case "gspo":
            return gspo
        case "cispo":
            return cispo
        case _:
            return clipped_ratio
