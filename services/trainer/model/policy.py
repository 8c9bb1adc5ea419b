"""One rank's share of the policy: its part of the model, of every batch, and of the optimizer.

Everything here runs in the rank's compute thread. All ranks call the same methods in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import ConfigError, DataLoss
from headrace.job.megatron.arguments import megatron
from headrace.job.model.transformer_config import contradictions
from headrace.job.rules.algorithm_rules import uses_critic, uses_reference
from headrace.job.rules.routing_rules import replays_routing
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.sample_checks import ModelBounds
from headrace.trajectory import Sample
from services.trainer.checkpoint.model_state import ModelState
from services.trainer.checkpoint.piece import Piece
from services.trainer.checkpoint.random_state import RandomState
from services.trainer.checkpoint.reader import CheckpointReader, opened
from services.trainer.data.reading import FetchSamples, Readable, Reader, Unreadable, all_readable
from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.export import export
from services.trainer.hugging_face.weights import weights_of
from services.trainer.megatron.gpt.gpt import build_stages, transformer_config
from services.trainer.megatron.gpt.routing_replay import RoutingReplay
from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
from services.trainer.megatron.packing import packing_of
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics.speed import Speed, peak_tflops
from services.trainer.metrics.stopwatch import Stopwatch
from services.trainer.model.critic import Critic
from services.trainer.model.head import TokenHead
from services.trainer.model.old_policies import OldPolicies
from services.trainer.model.pipeline import Pipeline
from services.trainer.model.preparation import Preparation, PreparedStep, teacher_log_probs
from services.trainer.model.reference import ReferencePolicy
from services.trainer.model.runner import Runner
from services.trainer.model.trainable import choose_trainable
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.cost import cost_of
from services.trainer.plan.experts import rollout_choices
from services.trainer.plan.flops import ModelFlops
from services.trainer.plan.planning import Planner, StepPlan
from services.trainer.rl.hooks import BeforeTrainStep
from services.trainer.rl.inputs import StepInputs, step_inputs
from services.trainer.rl.objective import Objective
from services.trainer.rl.rewards import RewardPostProcess, shaped_rewards
from services.trainer.weights.buckets import TensorSpec
from services.trainer.weights.canary import Canary, canary_sample

MODEL = "model"
"""The scalars of a checkpoint that say which model it is of"""
POLICY = "policy"
"""The part of a checkpoint that is trained"""


class Policy:
    """The model that is trained."""

    def __init__(self, job: Job, layout: Layout) -> None:
        args = megatron(job)
        architecture = read_architecture(job.model.hf_checkpoint)
        if wrong := contradictions(architecture, args):
            raise ConfigError("; ".join(wrong))
        self._job = job
        self._layout = layout
        self._bounds = ModelBounds.of(architecture)
        self._facts = architecture_facts(architecture)
        objective = Objective(job)
        config = transformer_config(architecture, args, layout)
        self._packing = packing_of(job, config, layout)
        self._planner = Planner(
            dp_size=layout.data_size,
            packing=self._packing,
            micro_batch_size=job.train.micro_batch_size,
            max_tokens=_max_tokens(job.train.max_tokens_per_gpu, layout),
            cost=cost_of(job, architecture),
            multiple_of=layout.micro_batch_multiple,
        )
        stages = build_stages(architecture, config, layout, self._packing)
        self._converter = Converter(architecture, layout, stages)
        self._converter.load(job.model.hf_checkpoint)
        if (initial := job.checkpoint.initial_megatron_checkpoint) is not None:
            ModelState(POLICY, self._converter.shards(), None).restore_weights(opened(initial, layout))
        choose_trainable(stages, job.train, layout)
        self._chunks = wrap_for_data_parallel(config, args, stages)
        self._steps_per_rollout = job.train.num_steps_per_rollout or 1
        own_rollouts = max(1, job.rollout.num_rollout - job.critic.num_critic_only_steps)
        replay = RoutingReplay(stages, layout.tp_rank) if replays_routing(job) else None
        self._choices = rollout_choices(architecture) if job.train.use_rollout_routing_replay else None
        self._reader = Reader(self.own_sample_ids, self._check, layout)
        self.set_aside: Sequence[Unreadable] = ()
        """Samples of the latest step that it could not use; equal on all ranks."""
        self._optimizer = Optimizer(args, self._chunks, own_rollouts * self._steps_per_rollout)
        self._stopwatch = Stopwatch(layout.device)
        self._speed = Speed(
            ModelFlops.of(architecture), layout.world_size, peak_tflops(job.tracking.peak_tflops, layout.device)
        )
        self._pipeline = Pipeline(
            Runner(config, self._chunks, layout, self._packing, self._stopwatch, replay=replay),
            TokenHead(stages[-1], layout),
            objective,
            layout,
            job.rollout.rollout_temperature,
            self._packing,
            self._stopwatch,
            agreement_bound=job.train.true_on_policy_bound if job.train.true_on_policy_mode else None,
        )
        self._critic = Critic(job, layout, self._stopwatch) if uses_critic(job) else None
        policy = ModelState(POLICY, self._converter.shards(), self._optimizer)
        reference, old_policies = self._frozen(job), self._old_policies(job)
        self._states = [policy] + ([self._critic.state] if self._critic else [])
        if reference is not None and job.train.ref_update_interval is not None:
            self._states.append(ModelState("reference", reference.shards(self._converter.shards()), None))
        self._parts: Sequence[ModelState | RandomState | OldPolicies] = [
            *self._states,
            RandomState(layout.rank),
            *([old_policies] if old_policies else []),
        ]
        self._prepare = Preparation(
            job, layout, self._pipeline, reference, self._teacher(job), self._critic, old_policies
        )
        hooks = job.hooks
        self._rewards = (
            RewardPostProcess(job, hooks.custom_reward_post_process_path, layout)
            if hooks.custom_reward_post_process_path
            else None
        )
        before = hooks.custom_megatron_before_train_step_hook_path
        self._before_train_step = BeforeTrainStep(job, before) if before else None

    @classmethod
    def build(cls, job: Job, layout: Layout) -> Policy:
        """Loads job.model.hf_checkpoint into this rank's shard. Raises ConfigError when it does not fit."""
        return cls(job, layout)

    def train(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> dict[str, float]:
        """The optimizer steps of one rollout step; metrics are equal on all ranks, but for times."""
        with self._stopwatch.host_part("fetch"):
            read = self._reader.read(samples, fetch)
            plans = self._planner.plan(read.samples, self._steps_per_rollout)
            inputs = self._inputs(step, plans, read, fetch)
        self.set_aside = read.set_aside
        with self._stopwatch.part("log_probs"):
            prepared = self._prepare(step, inputs)
        rows = [
            self._optimizer_step(step, step_id, one, updates=not plan.is_empty)
            for step_id, (plan, one) in enumerate(zip(plans, prepared, strict=True))
        ]
        metrics = {name: _COMBINED.get(name, _mean)([row[name] for row in rows]) for name in rows[0]}
        metrics |= self._pipeline.distance.read() | self._prepare.metrics()
        return metrics | self._speed.metrics(read.samples, self._stopwatch.read())

    def own_sample_ids(self, samples: Sequence[SampleFacts]) -> list[str]:
        """What `train` will fetch here of these samples, in that order."""
        plans = self._planner.plan(samples, self._steps_per_rollout)
        return [sample_id for plan in plans for sample_id in plan.sample_ids(self._layout.data_rank)]

    def log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens [R] under the current weights; [] except on last-stage ranks.

        `temperature` absent: the rollouts'.
        """
        return self._pipeline.response_log_probs(samples, temperature)

    def canary(self) -> Canary | None:
        """Collective: a short sequence and its log-probs under the current weights; None except on last-stage ranks."""
        sample = canary_sample(self._bounds.vocab_size)
        found = self.log_probs([sample], temperature=1.0)
        return Canary(sample.tokens.tolist(), found[0].tolist()) if found else None

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (Hugging Face name, whole tensor) on senders, nothing elsewhere."""
        if self._layout.gathers:
            yield from self._converter.hf_tensors()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        """What this stage's sender yields, in order."""
        return self._converter.hf_tensor_specs()

    def pieces(self) -> Iterator[Piece]:
        """This rank's share of a checkpoint: weights, optimizer, random states."""
        for part in self._parts:
            yield from part.pieces()

    def scalars(self) -> dict[str, Any]:
        """The numbers of a checkpoint, equal on all ranks."""
        scalars = {name: value for state in self._states for name, value in state.scalars().items()}
        return {MODEL: self._facts} | scalars

    def restore(self, reader: CheckpointReader) -> None:
        """The other way, bit for bit, whatever layout wrote it. Raises DataLoss unless it is of this very model."""
        require_same_model(reader.scalars[MODEL], self._facts)
        for part in self._parts:
            part.restore(reader)

    def export(self, folder: Path) -> None:
        """Collective: a complete Hugging Face folder of the current weights."""
        export(self.hf_tensors(), self.hf_tensor_specs(), self._job.model.hf_checkpoint, folder, self._layout)

    def _check(self, sample: Sample) -> None:
        """Raises InvalidArgument for a sample that this model and this job cannot be trained on."""
        self._bounds.check(sample.sample_id, sample.tokens, sample.columns)
        if self._choices is not None:
            self._choices.check(sample)
        if self._job.distillation.use_opd and self._job.distillation.opd_type != "megatron":
            teacher_log_probs(sample)

    def _inputs(self, step: int, plans: Sequence[StepPlan], read: Readable, fetch: FetchSamples) -> list[StepInputs]:
        samples, train = read.samples, self._job.train
        if self._rewards is None:
            rewards = shaped_rewards(samples, train)
        else:
            rewards = self._rewards(samples, lambda sample_ids: all_readable(fetch(sample_ids)))
        return [
            step_inputs(plan, step, samples, rewards, read.own, train, self._layout, self._packing, self._choices)
            for plan in plans
        ]

    def _optimizer_step(self, step: int, step_id: int, prepared: PreparedStep, *, updates: bool) -> dict[str, float]:
        """Without `updates` all is computed, for collectives to meet, and no weight moves, not even by momentum."""
        metrics = self._train_critic(prepared, updates=updates)
        if step < self._job.critic.num_critic_only_steps:
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

    def _frozen(self, job: Job) -> ReferencePolicy | None:
        if not uses_reference(job):
            return None
        return ReferencePolicy(self._weights, self._converter, job.model.ref_load)

    def _old_policies(self, job: Job) -> OldPolicies | None:
        if not job.train.keep_old_actor:
            return None
        interval = job.publish.update_weights_interval
        # The oldest sample that is admitted, in publications, and the newest publication.
        capacity = job.buffer.max_staleness // interval + 2
        return OldPolicies(self._weights, self._converter.shards(), capacity=capacity, publish_interval=interval)

    @property
    def _weights(self) -> Mapping[str, Tensor]:
        return weights_of([chunk.module for chunk in self._chunks])

    def _teacher(self, job: Job) -> ReferencePolicy | None:
        if not job.distillation.use_opd or job.distillation.opd_type != "megatron":
            return None
        return ReferencePolicy(self._weights, self._converter, job.distillation.opd_teacher_load)


def architecture_facts(architecture: Architecture) -> dict[str, Any]:
    """As a checkpoint's JSON has them."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return facts


def require_same_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises DataLoss that names facts in which two architectures differ; their tensors may have the same shapes."""
    names = [name for name in sorted(saved.keys() | here.keys()) if saved.get(name) != here.get(name)]
    if names:
        differences = ", ".join(f"{name} is {saved.get(name)} there and {here.get(name)} here" for name in names[:5])
        raise DataLoss(
            f"the checkpoint is of another model: {differences}: resume with the --hf-checkpoint that it was saved "
            "with, or take its weights alone with --initial-megatron-checkpoint"
        )


def _max_tokens(per_rank: int | None, layout: Layout) -> int | None:
    """A micro-batch's: the ranks of a context group have a part of it each."""
    return None if per_rank is None else per_rank * layout.context.size


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "log_prob_diff/max": max,
    "ratio/max": max,
    "tis_weight/max": max,
    "tokens": sum,
}
"""How a metric of several optimizer steps becomes the rollout step's, where that is not its mean."""
