"""From a loss per token to the loss of an optimizer step, whatever the micro-batches and ranks it is spread over.

Every token has a weight that depends on the step's samples alone, so the step's loss is the plain sum of weight times
loss over all tokens of all micro-batches of all data-parallel ranks: nothing is averaged on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, where

from headrace.trajectory import Status
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.precision import precise


@dataclass(frozen=True, slots=True)
class Reduction:
    """The divisors of a step's loss weights.

    Counted are samples that did not fail. A rollout that fanned out into several samples is one rollout, as long as all
    of them; one without a token to train counts too, with a loss of 0.
    """

    num_rollouts: int
    num_tokens: int
    divisors: Mapping[str, float]
    """The divisor of a sample's trained tokens by sample_id. Samples without such a token have none."""

    @classmethod
    def of(cls, samples: Sequence[SampleFacts], *, per_token: bool = False, constant: float | None = None) -> Reduction:
        """Returns the reduction of one optimizer step's samples, those of all data-parallel ranks.

        Default: the mean over a rollout's tokens, averaged over rollouts: 1 / rollout's tokens / num_rollouts.
        `per_token`: 1 / num_tokens. `constant`: 1 / constant / num_rollouts, a rollout's sum over a fixed length, so
        that long answers are not discounted (Dr.GRPO, arXiv:2503.20783).
        """
        counted = [s for s in samples if s.status != Status.FAILED.value]
        lengths: dict[tuple[str, str], int] = {}
        for sample in counted:
            lengths[sample.rollout] = lengths.get(sample.rollout, 0) + sample.trained_tokens
        num_tokens = sum(lengths.values())

        def divisor(sample: SampleFacts) -> float:
            if per_token:
                return float(num_tokens)
            return (lengths[sample.rollout] if constant is None else constant) * float(len(lengths))

        trained = [sample for sample in counted if sample.trained_tokens]
        return cls(len(lengths), num_tokens, {sample.sample_id: divisor(sample) for sample in trained})

    def weight(self, sample_id: str) -> float:
        """The weight of each trained token of the sample; 0 for a sample that is not counted, or not of this step."""
        divisor = self.divisors.get(sample_id)
        return 1.0 / divisor if divisor is not None else 0.0


def weighted_sum(per_token: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · value as a float32 scalar; a value that is not finite where the weight is 0 does not count."""
    return (where(weights > 0, precise(per_token), 0.0) * weights).sum()
