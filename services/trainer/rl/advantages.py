"""From a rollout batch's rewards to an advantage for every token, by the job's estimator.

Rewards are each sample's own, or compared with its group. Advantages are computed once a rollout step, before its
optimizer steps, on the ranks that see log-probs (the last pipeline stage): every data-parallel rank for its own
samples, all of them together for whitening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.job.schema.training import TrainSection
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.distillation import distilled_advantages
from services.trainer.rl.algorithms.groups import raw_rewards
from services.trainer.rl.algorithms.grpo import grpo_rewards
from services.trainer.rl.algorithms.kl import kl_estimate, token_rewards
from services.trainer.rl.algorithms.numerics import whiten
from services.trainer.rl.algorithms.ppo import gae
from services.trainer.rl.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from services.trainer.rl.algorithms.rloo import rloo_rewards
from services.trainer.rl.hooks import AdvantageHook, RolloutData, put_back
from services.trainer.rl.inputs import MicroInputs, require


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """A micro-batch's values before it is trained on, [B, S] each; None where the job does not need it."""

    micro: MicroInputs
    log_probs: Tensor | None
    """The policy's, under the weights that this rollout step starts from, or the engine's with use_rollout_logprobs."""
    reference_log_probs: Tensor | None
    teacher_log_probs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class ResponseValues:
    """One response, [R] each."""

    reward: float
    mask: Tensor
    log_probs: Tensor | None
    kl: Tensor | None
    teacher_log_probs: Tensor | None
    values: Tensor | None


Estimate = Callable[[ResponseValues], tuple[Tensor, Tensor]]


class Advantages:
    """The job's estimator. `group`: the data-parallel ranks that whiten together.

    `distillation`: the weight of the reverse KL to a teacher, None without one.
    """

    def __init__(
        self,
        config: TrainSection,
        group: dist.ProcessGroup | None,
        *,
        hook: AdvantageHook | None = None,
        distillation: float | None = None,
    ) -> None:
        self._config = config
        self._group = group
        self._estimate = _estimator(config)
        self._hook = hook
        self._distillation = distillation

    @property
    def needs_log_probs(self) -> bool:
        """True when advantages depend on the policy's own log-probs."""
        if self._config.loss_type == "sft_loss":
            return False
        return self._config.kl_coef > 0 or self._distillation is not None or self._hook is not None

    def __call__(self, batch: Sequence[AdvantageInputs]) -> list[MicroInputs]:
        """The micro-batches with advantages and returns filled in."""
        responses = [response for inputs in batch for response in self._responses(inputs)]
        masks = [response.mask for response in responses]
        if self._hook is None:
            estimates = [self._estimate(response) for response in responses]
            advantages, returns = [a for a, _ in estimates], [r for _, r in estimates]
        else:
            advantages, returns = _by_hook(self._hook, batch, responses)
        if self._distillation is not None:
            advantages = [_distilled(a, t, self._distillation) for a, t in zip(advantages, responses, strict=True)]
        if self._config.normalize_advantages:
            advantages = whiten(advantages, masks, self._group)
        return put_back([inputs.micro for inputs in batch], advantages, returns)

    def _responses(self, inputs: AdvantageInputs) -> list[ResponseValues]:
        micro = inputs.micro

        def cut(values: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(micro.samples) if values is None else micro.cut(values)

        kl = None
        if self._config.kl_coef > 0:
            own, reference = require(inputs.log_probs), require(inputs.reference_log_probs)
            kl = kl_estimate(own, reference, self._config.kl_reward_type)
        columns = (inputs.log_probs, kl, inputs.teacher_log_probs, inputs.values)
        parts = zip(micro.rewards, micro.cut(micro.mask), *map(cut, columns), strict=True)
        return [ResponseValues(*part) for part in parts]


def _distilled(advantages: Tensor, response: ResponseValues, weight: float) -> Tensor:
    found = distilled_advantages(advantages, require(response.log_probs), require(response.teacher_log_probs), weight)
    return torch.where(response.mask > 0, found, 0.0)


def _by_hook(
    hook: AdvantageHook, batch: Sequence[AdvantageInputs], responses: Sequence[ResponseValues]
) -> tuple[list[Tensor], list[Tensor]]:
    micros = [e.micro for e in batch]
    data = RolloutData.of(micros)
    data["kl"] = [t.kl.clone() if t.kl is not None else torch.zeros_like(t.mask) for t in responses]
    for name in ("log_probs", "teacher_log_probs", "values"):
        found = [getattr(response, name) for response in responses]
        data[name] = [f.clone() for f in found if f is not None] if all(f is not None for f in found) else None
    hook(data)
    return data.per_token("advantages", micros), data.per_token("returns", micros)


def _estimator(config: TrainSection) -> Estimate:
    def same_for_all_tokens(response: ResponseValues) -> tuple[Tensor, Tensor]:
        advantages = torch.where(response.mask > 0, response.reward, 0.0).double()
        return advantages, advantages

    def ppo(response: ResponseValues) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(response.reward, response.mask, response.kl, config.kl_coef)
        return gae(rewards, require(response.values), response.mask, gamma=config.gamma, lambd=config.lambd)

    def discounted(response: ResponseValues) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(response.reward, response.mask, response.kl, config.kl_coef)
        returns = reinforce_plus_plus(rewards, response.mask, gamma=config.gamma)
        return returns, returns

    def against_baseline(response: ResponseValues) -> tuple[Tensor, Tensor]:
        found = reinforce_plus_plus_baseline(response.reward, response.mask, response.kl, config.kl_coef)
        return found, found

    match config.advantage_estimator:
        case "ppo":
            return ppo
        case "reinforce_plus_plus":
            return discounted
        case "reinforce_plus_plus_baseline":
            return against_baseline
        case "grpo" | "gspo" | "cispo" | "rloo":
            return same_for_all_tokens


def shaped_rewards(samples: Sequence[SampleFacts], config: TrainSection) -> dict[str, float]:
    """The samples of the whole rollout batch by sample_id; 0 for those that failed or have no reward."""
    match config.advantage_estimator:
        case "grpo" | "gspo" | "cispo":
            if config.disable_rewards_normalization:
                return raw_rewards(samples)
            return grpo_rewards(samples, divide_by_std=not config.disable_grpo_std_normalization)
        case "reinforce_plus_plus_baseline":
            return grpo_rewards(samples, divide_by_std=False)
        case "rloo":
            return rloo_rewards(samples)
        case "reinforce_plus_plus" | "ppo":
            return raw_rewards(samples)
