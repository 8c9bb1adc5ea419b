"""From a rollout batch's rewards to an advantage for every token, by the job's estimator.

Rewards are each sample's own, or compared with its group. Advantages are computed once a rollout step, before its
optimizer steps, on the ranks that see log-probs (the last pipeline stage): every data-parallel rank for its own
samples, all of them together for whitening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.job.schema.training import TrainSection
from services.trainer.rl.algorithms.algorithm import ResponseValues, require
from services.trainer.rl.algorithms.kl import distilled_advantages, kl_estimate
from services.trainer.rl.algorithms.numerics import whiten
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.hooks import RolloutData, put_back
from services.trainer.rl.inputs import MicroInputs


@dataclass(frozen=True, slots=True)
class Advantages:
    """The job's estimator. `group`: the data-parallel ranks that whiten together.

    `distillation`: the weight of the reverse KL to a teacher, None without one. `hook` is a user's function of the
    rollout's data, which sets `advantages` and `returns`.
    """

    config: TrainSection
    group: dist.ProcessGroup | None
    _: KW_ONLY
    hook: Callable[[RolloutData], None] | None = None
    distillation: float | None = None

    @property
    def needs_log_probs(self) -> bool:
        """True when advantages depend on the policy's own log-probs."""
        if self.config.loss_type == "sft_loss":
            return False
        return self.config.kl_coef > 0 or self.distillation is not None or self.hook is not None

    def __call__(self, batch: Sequence[MicroInputs]) -> list[MicroInputs]:
        """The micro-batches with advantages and returns filled in."""
        responses = [response for micro in batch for response in self._responses(micro)]
        masks = [response.mask for response in responses]
        if self.hook is None:
            estimator = algorithm(self.config)
            estimates = [estimator.advantages(response) for response in responses]
            advantages, returns = [a for a, _ in estimates], [r for _, r in estimates]
        else:
            advantages, returns = _by_hook(self.hook, batch, responses)
        if self.distillation is not None:
            advantages = [_distilled(a, t, self.distillation) for a, t in zip(advantages, responses, strict=True)]
        if self.config.normalize_advantages:
            advantages = whiten(advantages, masks, self.group)
        return put_back(batch, advantages, returns)

    def _responses(self, micro: MicroInputs) -> list[ResponseValues]:
        def cut(values: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(micro.samples) if values is None else micro.cut(values)

        kl = None
        if self.config.kl_coef > 0:
            own, reference = require(micro.own_log_probs), require(micro.reference_log_probs)
            kl = kl_estimate(own, reference, self.config.kl_reward_type)
        columns = (micro.own_log_probs, kl, micro.teacher_log_probs, micro.values)
        parts = zip(micro.rewards, micro.cut(micro.mask), *map(cut, columns), strict=True)
        return [ResponseValues(*part) for part in parts]


def _distilled(advantages: Tensor, response: ResponseValues, weight: float) -> Tensor:
    found = distilled_advantages(advantages, require(response.log_probs), require(response.teacher_log_probs), weight)
    return torch.where(response.mask > 0, found, 0.0)


def _by_hook(
    hook: Callable[[RolloutData], None], micros: Sequence[MicroInputs], responses: Sequence[ResponseValues]
) -> tuple[list[Tensor], list[Tensor]]:
    data = RolloutData.of(micros)
    data["kl"] = [t.kl.clone() if t.kl is not None else torch.zeros_like(t.mask) for t in responses]
    for name in ("log_probs", "teacher_log_probs", "values"):
        found = [getattr(response, name) for response in responses]
        data[name] = [f.clone() for f in found if f is not None] if all(f is not None for f in found) else None
    hook(data)
    return data.per_token("advantages", micros), data.per_token("returns", micros)
