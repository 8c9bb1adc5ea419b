"""A rollout step on one rank: its samples read and laid out, values and advantages prepared, optimizer steps taken.

Frozen log-probs, values and advantages are computed before the first optimizer step. In each optimizer step the critic
comes first, then the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Vision
from headrace.trajectory import TEACHER_LOG_PROBS, Sample
from services.trainer.data.samples import FetchSamples, UnusableSample, all_readable, read_samples
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.megatron.parallel import Layout
from services.trainer.megatron.routing_replay import Routing
from services.trainer.metrics import Stopwatch, TeacherDistance, accepted_drafts
from services.trainer.model.critic import Critic
from services.trainer.model.frozen_policies import HostCopy, OldLogProbs
from services.trainer.model.pipeline import Pipeline
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import Planner, StepPlan
from services.trainer.plan.rows import Packing, RolloutChoices
from services.trainer.rl.advantages import Advantages
from services.trainer.rl.algorithms.algorithm import require
from services.trainer.rl.algorithms.mis import LEAST_MEAN_WEIGHT, mean_weight_sums
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.hooks import BatchChanges, WholeBatchHooks, changed_by
from services.trainer.rl.inputs import MicroInputs, StepInputs, filled, step_inputs
from services.trainer.rl.objective import weights_of
from services.trainer.rl.sampling_mask import lacks_mask


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """`plans` and `inputs` have one entry for each optimizer step."""

    samples: Sequence[SampleFacts]
    """All of the rollout batch, equal on all ranks; those that were set aside are FAILED"""
    set_aside: Sequence[UnusableSample]
    """Samples that could not be used, equal on all ranks"""
    plans: Sequence[StepPlan]
    inputs: Sequence[StepInputs]
    metrics: Mapping[str, float]
    """Numbers that users' functions report with the step, and how engines' drafts did"""
    is_logged: bool
    """A user's function has logged the rollout"""


@dataclass(frozen=True, slots=True)
class BatchReader:
    """`check` raises InvalidArgument for a sample that this model and this job cannot be trained on."""

    config: TrainSection
    planner: Planner
    check: Callable[[Sample], None]
    layout: Layout
    packing: Packing
    _: KW_ONLY
    hooks: WholeBatchHooks | None
    choices: RolloutChoices | None
    vision: Vision | None = None

    def own_sample_ids(self, samples: Sequence[SampleFacts]) -> list[str]:
        """The ids of the samples that `read` will fetch on this rank, in that order."""
        plans = self.planner.plan(samples, self.config.num_steps_per_rollout or 1)
        return [sample_id for plan in plans for sample_id in plan.sample_ids(self.layout.data_rank)]

    def read(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> RolloutBatch:
        """Collective: fetches this rank's samples, and puts them onto its device."""
        read = read_samples(samples, fetch, self.own_sample_ids, self.check, self.layout)
        changes = BatchChanges()
        if self.hooks is not None:
            changes = self.hooks(step, read.samples, lambda sample_ids: all_readable(fetch(sample_ids)))
        facts = [changes.of_facts(sample) for sample in read.samples]
        own = {sample_id: changes.of_sample(sample) for sample_id, sample in read.own.items()}
        rewards = changes.reward_of_each(facts) or algorithm(self.config).rewards(facts)
        plans = self.planner.plan(facts, self.config.num_steps_per_rollout or 1)
        how = (self.config, self.layout, self.packing, self.choices, self.vision)
        inputs = [step_inputs(plan, step, facts, rewards, own, *how) for plan in plans]
        metrics = {**changes.metrics, **accepted_drafts(read.own.values(), self.layout.device)}
        return RolloutBatch(facts, read.set_aside, plans, inputs, metrics, changes.is_logged)


@dataclass(frozen=True, slots=True)
class Preparation:
    """Asks the frozen policies and the critic, once for all optimizer steps of a rollout step.

    `distance`: there is a teacher, held by these ranks (`teacher`) or asked while the samples were made. `data_hook` is
    given the step and its data; `before_log_prob` "ref_" or "teacher_" before that policy's passes. With `top_p` and
    `top_k` the engines have sampled.
    """

    config: TrainSection
    layout: Layout
    pipeline: Pipeline
    old: OldLogProbs
    advantages: Advantages
    _: KW_ONLY
    reference: HostCopy | None
    teacher: HostCopy | None
    critic: Critic | None
    data_hook: Callable[..., None] | None
    before_log_prob: Callable[[str], None] | None
    distance: TeacherDistance | None
    top_p: float = 1.0
    top_k: int | None = None

    def __call__(self, step: int, steps: Sequence[StepInputs]) -> Sequence[StepInputs]:
        """Collective over all ranks."""
        self._update_reference(step)
        by_advantages = self.advantages.needs_log_probs and not self.config.use_rollout_logprobs
        normalizes = self.config.tis_batch_normalize
        steps = self._with_masks(steps)
        steps = self.old(step, steps, for_advantages=by_advantages or normalizes)
        steps = self._under(self.reference, "ref_", "reference_log_probs", steps)
        steps = self._under(self.teacher, "teacher_", "teacher_log_probs", steps)
        if self.critic is not None:
            steps = [filled(inputs, "values", self.critic.values(inputs)) for inputs in steps]
        if not self.layout.is_last_stage or self.config.loss_type == "sft_loss":
            return steps
        if normalizes:
            steps = [self._normalized(inputs) for inputs in steps]
        return self._with_advantages(step, steps)

    def metrics(self) -> dict[str, float]:
        """Collective: what was seen since it was asked last."""
        return {} if self.distance is None else self.distance.read()

    def _update_reference(self, step: int) -> None:
        interval = self.config.ref_update_interval
        if self.reference is not None and interval is not None and step and step % interval == 0:
            self.reference.take()

    def _with_masks(self, steps: Sequence[StepInputs]) -> Sequence[StepInputs]:
        """Sampling masks for samples that came without, where they are kept; no pass where all have theirs."""
        if not self.config.keep_sampling_mask:
            return steps
        lacking = any(lacks_mask(sample) for inputs in steps for micro in inputs for sample in micro.samples)
        anywhere = torch.tensor(int(lacking), device=self.layout.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        if not anywhere.item():
            return steps
        routing: Routing = "replay" if self.config.use_rollout_routing_replay else "free"
        return [self.pipeline.masked(inputs, self.top_p, self.top_k, routing) for inputs in steps]

    def _under(
        self, policy: HostCopy | None, prefix: str, name: str, steps: Sequence[StepInputs]
    ) -> Sequence[StepInputs]:
        if policy is None:
            return steps
        with policy.in_place():
            if self.before_log_prob is not None:
                self.before_log_prob(prefix)
            return [filled(inputs, name, self.pipeline.log_probs(inputs)) for inputs in steps]

    def _with_advantages(self, step: int, steps: Sequence[StepInputs]) -> list[StepInputs]:
        batch = [self._known(micro) for inputs in steps for micro in inputs]
        if self.distance is not None and self.layout.is_reporting_rank:  # the others know the same of the same samples
            for micro in batch:
                self.distance.add(require(micro.own_log_probs), require(micro.teacher_log_probs), micro.mask)
        found = self.advantages(batch)
        if self.data_hook is not None:
            found = changed_by(partial(self.data_hook, step), found)
        rest = iter(found)
        return [list(islice(rest, len(inputs))) for inputs in steps]

    def _known(self, micro: MicroInputs) -> MicroInputs:
        """With the log-probs that travelled with the samples, where the job takes the engine's or a teacher's."""
        if self.config.use_rollout_logprobs:
            micro = replace(micro, own_log_probs=micro.rollout_log_probs)
        if self.distance is not None and micro.teacher_log_probs is None:
            micro = replace(micro, teacher_log_probs=micro.put([teacher_log_probs(one) for one in micro.samples]))
        return micro

    def _normalized(self, inputs: StepInputs) -> StepInputs:
        """The inputs with the mean of this optimizer step's importance weights over all data-parallel ranks."""
        config = self.config
        sums = torch.zeros(2, dtype=torch.float64, device=self.layout.device)
        for micro in inputs:
            found = weights_of(config, micro, require(micro.own_log_probs))
            sums += mean_weight_sums(found, micro.mask, config.tis_level, config.tis_mode)
        dist.all_reduce(sums, group=self.layout.data_group)
        total, count = sums.tolist()
        mean = total / count if total > LEAST_MEAN_WEIGHT * count else 1.0
        return [replace(micro, mean_weight=mean) for micro in inputs]


def teacher_log_probs(sample: Sample) -> Tensor:
    """float32 [R], as they travelled with the sample. Raises InvalidArgument for a sample without."""
    column = sample.columns.get(TEACHER_LOG_PROBS)
    if column is None:
        raise InvalidArgument(
            f"sample {sample.sample_id} has no teacher_log_probs for its {sample.response_length} response tokens: "
            "set --opd-teacher-url, or sample.teacher_log_probs in the generate function"
        )
    return torch.from_numpy(column.astype("float32"))


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Trains on prepared steps; in the first `critic_only_steps` rollout steps the policy stays as it is.

    `before_train_step` is given the step, the number of the optimizer step, a list of this rank's Megatron modules, and
    Megatron's optimizer and scheduler.
    """

    pipeline: Pipeline
    chunks: Sequence[DistributedDataParallel]
    optimizer: Optimizer
    stopwatch: Stopwatch
    _: KW_ONLY
    critic: Critic | None
    critic_only_steps: int
    before_train_step: Callable[..., None] | None

    def __call__(self, step: int, plans: Sequence[StepPlan], prepared: Sequence[StepInputs]) -> dict[str, float]:
        """The rollout step's metrics, equal on all ranks."""
        rows = [
            self._step(step, step_id, one, updates=not plan.is_empty)
            for step_id, (plan, one) in enumerate(zip(plans, prepared, strict=True))
        ]
        return {name: _COMBINED.get(name, _mean)([row[name] for row in rows]) for name in rows[0]}

    def _step(self, step: int, step_id: int, inputs: StepInputs, *, updates: bool) -> dict[str, float]:
        """Computes everything also without `updates`, as ranks wait for each other, but changes no weight then."""
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self.stopwatch.part("critic"):
                metrics = self.critic.train(inputs, updates=updates)
        if step < self.critic_only_steps:
            return metrics
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.before_train_step is not None:
            self.before_train_step(step, step_id, self.chunks, *self.optimizer.megatron)
        with self.stopwatch.part("forward_backward"):
            metrics |= self.pipeline.forward_backward(inputs)
        with self.stopwatch.part("optimizer"):
            return metrics | self.optimizer.step(updates=updates)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "log_prob_diff/max": max,
    "ratio/max": max,
    "tis_weight/max": max,
    "tokens": sum,
}
"""How a metric of several optimizer steps becomes the rollout step's, where that is not its mean."""
