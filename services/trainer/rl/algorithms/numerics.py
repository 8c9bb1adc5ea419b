"""The arithmetic under all algorithms: precision, sums over a response, discounts, whitening, a step's loss.

All mathematics is float32, whatever the model computes in, and does not overflow. A response is a row of a
micro-batch. Whitening gives the advantages of all data-parallel ranks together mean 0 and variance 1.

From a loss per token to the loss of an optimizer step, whatever the micro-batches and ranks it is spread over: every
token has a weight that depends on the step's samples alone, so the step's loss is the plain sum of weight times loss
over all tokens of all micro-batches of all data-parallel ranks. Nothing is averaged on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, where

from headrace.trajectory import Status
from services.trainer.plan.batch import SampleFacts


def precise(values: Tensor) -> Tensor:
    """Returns the values in float32; float64 stays, so that gradients can be compared with finite differences."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


LOG_RATIO_LIMIT = 20.0
"""exp overflows float32 from 88 on; from 20 on a ratio is far outside of any bound."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Within ±20, to be exponentiated: beyond, the value stays there and the gradient is 0, never 0 · inf."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of a row's masked-in values, [B, 1] from [B, R]; what is not finite elsewhere does not count."""
    return where(mask > 0, values, 0.0).sum(dim=1, keepdim=True)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Their mean, [B, 1]; 0 for a response that is masked in whole."""
    return sequence_sum(values, mask) / (mask > 0).sum(dim=1, keepdim=True).clamp(min=1)


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """y_t = Σ_{k ≥ t} factor^(k-t) x_k, float64 [N] from [N]."""
    total, found = 0.0, []
    for value in reversed(values.tolist()):
        total = value + factor * total
        found.append(total)
    return torch.tensor(found[::-1], dtype=torch.float64, device=values.device)


EPSILON = 1e-8


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """(x - mean) · rsqrt(var + 1e-8) where the mask is 1, else 0; float32, shapes as given.

    Mean and Bessel-corrected variance are over the masked-in tokens of every rank of `group` (None: this rank alone),
    which all call this together, those without a token too. Sums are taken in float64, so that the result does not
    depend on how tokens are spread over ranks.
    """
    device = masks[0].device if masks else torch.device("cpu")
    kept = [v.double()[m > 0] for v, m in zip(values, masks, strict=True)]
    flat = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64, device=device)
    total, count = _summed(torch.stack((flat.sum(), flat.new_tensor(float(flat.numel())))), group)
    mean = total / count.clamp(min=1.0)
    (squares,) = _summed(((flat - mean) ** 2).sum()[None], group)
    scale = (squares / (count - 1.0).clamp(min=1.0) + EPSILON).rsqrt()
    return [torch.where(m > 0, (v.double() - mean) * scale, 0.0).float() for v, m in zip(values, masks, strict=True)]


def _summed(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(local, group=group)
    return local


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
