"""From a loss per token to the loss of an optimizer step, whatever the micro-batches and ranks it is spread over.

Every token has a weight that depends on the step's samples alone, so the step's loss is the plain sum of weight times
loss over all tokens of all micro-batches of all data-parallel ranks: nothing is averaged on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, where

from headrace.trajectory import Status
from services.trainer.batch import SampleFacts


@dataclass(frozen=True, slots=True)
class Reduction:
    """What the weights of a step are divided by. Counted: samples that did not fail and have a token to train."""

    num_rollouts: int
    num_tokens: int
    per_token: bool

    @classmethod
    def of(cls, samples: Sequence[SampleFacts], *, per_token: bool) -> Reduction:
        """For the samples of one optimizer step, those of all data-parallel ranks."""
        lengths = [s.trained_tokens for s in samples if s.status != Status.FAILED.value and s.trained_tokens]
        return cls(num_rollouts=len(lengths), num_tokens=sum(lengths), per_token=per_token)

    def weights(self, loss_mask: Tensor, trained_tokens: Tensor) -> Tensor:
        """Float32 [B, S] from the mask [B, S] and the trained tokens [B] of each whole sample, by its facts.

        Per token: mask / num_tokens. Otherwise the mean over a rollout's tokens, averaged over rollouts:
        mask / trained_tokens / num_rollouts. All weights of a step sum to 1; a fully masked sample weighs 0.
        """
        mask = loss_mask.float()
        if self.per_token:
            return mask / max(self.num_tokens, 1)
        return mask / trained_tokens.float().clamp(min=1.0)[:, None] / max(self.num_rollouts, 1)


def weighted_sum(per_token: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · value as a float32 scalar; a value that is not finite where the weight is 0 does not count."""
    return (where(weights > 0, per_token.float(), 0.0) * weights).sum()
