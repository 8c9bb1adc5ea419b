"""The step from rewards to an advantage for every token of a rollout batch, by the job's estimator.

Runs once a rollout step, before its optimizer steps, on the ranks that see log-probs (the last pipeline stage): every
data-parallel rank for its own samples, all of them together for whitening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.job.schema.training import TrainSection
from services.trainer.rl.algorithms.distillation import distilled_advantages
from services.trainer.rl.algorithms.gae import gae
from services.trainer.rl.algorithms.kl import kl_estimate
from services.trainer.rl.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from services.trainer.rl.algorithms.token_rewards import token_rewards
from services.trainer.rl.algorithms.whitening import whiten
from services.trainer.rl.hooks import AdvantageHook, RolloutData, put_back
from services.trainer.rl.inputs import MicroInputs
from services.trainer.rl.known import needed


@dataclass(frozen=True, slots=True)
class Evidence:
    """A micro-batch's values before it is trained on, [B, S] each; None where the job does not need it."""

    micro: MicroInputs
    log_probs: Tensor | None
    """The policy's, under the weights that this rollout step starts from, or the engine's with use_rollout_logprobs."""
    reference_log_probs: Tensor | None
    teacher_log_probs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Trace:
    """One response, [R] each."""

    reward: float
    mask: Tensor
    log_probs: Tensor | None
    kl: Tensor | None
    teacher_log_probs: Tensor | None
    values: Tensor | None


Estimate = Callable[[Trace], tuple[Tensor, Tensor]]


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

    def __call__(self, batch: Sequence[Evidence]) -> list[MicroInputs]:
        """The micro-batches with advantages and returns filled in."""
        traces = [trace for evidence in batch for trace in self._traces(evidence)]
        masks = [trace.mask for trace in traces]
        if self._hook is None:
            estimates = [self._estimate(trace) for trace in traces]
            advantages, returns = [a for a, _ in estimates], [r for _, r in estimates]
        else:
            advantages, returns = _by_hook(self._hook, batch, traces)
        if self._distillation is not None:
            advantages = [_distilled(a, t, self._distillation) for a, t in zip(advantages, traces, strict=True)]
        if self._config.normalize_advantages:
            advantages = whiten(advantages, masks, self._group)
        return put_back([evidence.micro for evidence in batch], advantages, returns)

    def _traces(self, evidence: Evidence) -> list[Trace]:
        micro = evidence.micro

        def cut(values: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(micro.samples) if values is None else micro.cut(values)

        kl = None
        if self._config.kl_coef > 0:
            own, reference = needed(evidence.log_probs), needed(evidence.reference_log_probs)
            kl = kl_estimate(own, reference, self._config.kl_reward_type)
        columns = (evidence.log_probs, kl, evidence.teacher_log_probs, evidence.values)
        parts = zip(micro.rewards, micro.cut(micro.mask), *map(cut, columns), strict=True)
        return [Trace(*part) for part in parts]


def _distilled(advantages: Tensor, trace: Trace, weight: float) -> Tensor:
    found = distilled_advantages(advantages, needed(trace.log_probs), needed(trace.teacher_log_probs), weight)
    return torch.where(trace.mask > 0, found, 0.0)


def _by_hook(
    hook: AdvantageHook, batch: Sequence[Evidence], traces: Sequence[Trace]
) -> tuple[list[Tensor], list[Tensor]]:
    micros = [e.micro for e in batch]
    data = RolloutData.of(micros)
    data["kl"] = [t.kl.clone() if t.kl is not None else torch.zeros_like(t.mask) for t in traces]
    for name in ("log_probs", "teacher_log_probs", "values"):
        found = [getattr(trace, name) for trace in traces]
        data[name] = [f.clone() for f in found if f is not None] if all(f is not None for f in found) else None
    hook(data)
    return data.per_token("advantages", micros), data.per_token("returns", micros)


def _estimator(config: TrainSection) -> Estimate:
    def same_for_all_tokens(trace: Trace) -> tuple[Tensor, Tensor]:
        advantages = torch.where(trace.mask > 0, trace.reward, 0.0)
        return advantages, advantages

    def ppo(trace: Trace) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(trace.reward, trace.mask, trace.kl, config.kl_coef)
        return gae(rewards, needed(trace.values), trace.mask, gamma=config.gamma, lambd=config.lambd)

    def discounted(trace: Trace) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(trace.reward, trace.mask, trace.kl, config.kl_coef)
        returns = reinforce_plus_plus(rewards, trace.mask, gamma=config.gamma)
        return returns, returns

    def against_baseline(trace: Trace) -> tuple[Tensor, Tensor]:
        found = reinforce_plus_plus_baseline(trace.reward, trace.mask, trace.kl, config.kl_coef)
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
