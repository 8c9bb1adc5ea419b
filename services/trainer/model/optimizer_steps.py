"""The optimizer steps of a rollout step: the critic's and the policy's, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron.core.distributed import DistributedDataParallel

from services.trainer.megatron.optimizer import Optimizer
from services.trainer.metrics.stopwatch import Stopwatch
from services.trainer.model.critic import Critic
from services.trainer.model.pipeline import Pipeline
from services.trainer.model.preparation import PreparedStep
from services.trainer.plan.planning import StepPlan
from services.trainer.rl.hooks import BeforeTrainStep


class OptimizerSteps:
    """Trains on prepared steps; in the first `critic_only_steps` rollout steps the policy stays as it is."""

    def __init__(
        self,
        pipeline: Pipeline,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Optimizer,
        stopwatch: Stopwatch,
        *,
        critic: Critic | None,
        critic_only_steps: int,
        before_train_step: BeforeTrainStep | None,
    ) -> None:
        self._pipeline = pipeline
        self._chunks = chunks
        self._optimizer = optimizer
        self._stopwatch = stopwatch
        self._critic = critic
        self._critic_only_steps = critic_only_steps
        self._before_train_step = before_train_step

    def __call__(self, step: int, plans: Sequence[StepPlan], prepared: Sequence[PreparedStep]) -> dict[str, float]:
        """The rollout step's metrics, equal on all ranks."""
        rows = [
            self._step(step, step_id, one, updates=not plan.is_empty)
            for step_id, (plan, one) in enumerate(zip(plans, prepared, strict=True))
        ]
        return {name: _COMBINED.get(name, _mean)([row[name] for row in rows]) for name in rows[0]}

    def _step(self, step: int, step_id: int, prepared: PreparedStep, *, updates: bool) -> dict[str, float]:
        """Computes everything also without `updates`, as ranks wait for each other, but changes no weight then."""
        metrics = self._train_critic(prepared, updates=updates)
        if step < self._critic_only_steps:
            return metrics
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._before_train_step is not None:
            self._before_train_step(step, step_id, self._chunks, *self._optimizer.megatron)
        with self._stopwatch.part("forward_backward"):
            metrics |= self._pipeline.forward_backward(prepared.inputs, prepared.old, prepared.reference)
        with self._stopwatch.part("optimizer"):
            return metrics | self._optimizer.step(updates=updates)

    def _train_critic(self, prepared: PreparedStep, *, updates: bool) -> dict[str, float]:
        if self._critic is None:
            return {}
        with self._stopwatch.part("critic"):
            return self._critic.train(prepared.inputs, prepared.values, updates=updates)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "log_prob_diff/max": max,
    "ratio/max": max,
    "tis_weight/max": max,
    "tokens": sum,
}
"""How a metric of several optimizer steps becomes the rollout step's, where that is not its mean."""
