"""Computes frozen log-probs, values and advantages before the optimizer steps of a rollout step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.job.schema.training import TrainSection
from headrace.sample_checks import TEACHER_LOG_PROBS
from headrace.trajectory import Sample
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics.teacher_distance import TeacherDistance
from services.trainer.model.critic import Critic
from services.trainer.model.old_log_probs import OldLogProbs
from services.trainer.model.pipeline import Pipeline
from services.trainer.model.reference import ReferencePolicy
from services.trainer.rl.advantages import AdvantageInputs, Advantages
from services.trainer.rl.algorithms.mis import LEAST_MEAN_WEIGHT, mean_weight_sums
from services.trainer.rl.corrections import weights_of
from services.trainer.rl.hooks import BeforeLogProb, RolloutDataHook
from services.trainer.rl.inputs import MicroInputs, StepInputs
from services.trainer.rl.micro_values import MicroValues, at, needed


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """One optimizer step, ready to run."""

    inputs: StepInputs
    old: MicroValues
    reference: MicroValues
    values: MicroValues


class Preparation:
    """Asks the frozen policies and the critic, once for all optimizer steps of a rollout step.

    `distills`: there is a teacher, held by these ranks (`teacher`) or asked while the samples were made.
    """

    def __init__(
        self,
        config: TrainSection,
        layout: Layout,
        pipeline: Pipeline,
        old: OldLogProbs,
        advantages: Advantages,
        *,
        reference: ReferencePolicy | None,
        teacher: ReferencePolicy | None,
        critic: Critic | None,
        data_hook: RolloutDataHook | None,
        before_log_prob: BeforeLogProb | None,
        distills: bool,
    ) -> None:
        self._config = config
        self._layout = layout
        self._pipeline = pipeline
        self._old = old
        self._reference = reference
        self._teacher = teacher
        self._critic = critic
        self._advantages = advantages
        self._distance = TeacherDistance(layout.device) if distills else None
        self._data_hook = data_hook
        self._before_log_prob = before_log_prob

    def __call__(self, step: int, steps: Sequence[StepInputs]) -> list[PreparedStep]:
        """Collective over all ranks."""
        self._update_reference(step)
        by_advantages = self._advantages.needs_log_probs and not self._config.use_rollout_logprobs
        normalizes = self._config.tis_batch_normalize
        olds, kept = self._old(step, steps, for_advantages=by_advantages or normalizes)
        references = self._under(self._reference, "ref_", steps)
        teachers = self._under(self._teacher, "teacher_", steps)
        values: list[MicroValues] = [self._critic.values(inputs) if self._critic else None for inputs in steps]
        filled = list(steps)
        if self._layout.is_last_stage and self._config.loss_type != "sft_loss":
            filled = self._with_advantages(step, steps, olds, references, teachers, values)
            if normalizes:
                filled = [self._normalized(inputs, old) for inputs, old in zip(filled, olds, strict=True)]
        rows = zip(filled, kept, references, values, strict=True)
        return [PreparedStep(*row) for row in rows]

    def metrics(self) -> dict[str, float]:
        """Collective: what was seen since it was asked last."""
        return {} if self._distance is None else self._distance.read()

    def _update_reference(self, step: int) -> None:
        interval = self._config.ref_update_interval
        if self._reference is not None and interval is not None and step and step % interval == 0:
            self._reference.update()

    def _under(self, policy: ReferencePolicy | None, prefix: str, steps: Sequence[StepInputs]) -> list[MicroValues]:
        if policy is None:
            return [None] * len(steps)
        with policy.in_place():
            if self._before_log_prob is not None:
                self._before_log_prob(prefix)
            return [self._pipeline.log_probs(inputs) for inputs in steps]

    def _with_advantages(
        self,
        step: int,
        steps: Sequence[StepInputs],
        olds: Sequence[MicroValues],
        references: Sequence[MicroValues],
        teachers: Sequence[MicroValues],
        values: Sequence[MicroValues],
    ) -> list[StepInputs]:
        batch = [
            AdvantageInputs(
                micro,
                log_probs=micro.rollout_log_probs if self._config.use_rollout_logprobs else at(old, number),
                reference_log_probs=at(reference, number),
                teacher_log_probs=self._teacher_log_probs(micro, at(teacher, number)),
                values=at(value, number),
            )
            for inputs, old, reference, teacher, value in zip(steps, olds, references, teachers, values, strict=True)
            for number, micro in enumerate(inputs)
        ]
        self._measure(batch)
        found = self._advantages(batch)
        if self._data_hook is not None:
            found = self._data_hook(step, found)
        rest = iter(found)
        return [list(islice(rest, len(inputs))) for inputs in steps]

    def _normalized(self, inputs: StepInputs, old: MicroValues) -> StepInputs:
        """The inputs with the mean of this optimizer step's importance weights over all data-parallel ranks."""
        config = self._config
        sums = torch.zeros(2, dtype=torch.float64, device=self._layout.device)
        for number, micro in enumerate(inputs):
            found = weights_of(config, micro, needed(at(old, number)))
            sums += mean_weight_sums(found, micro.mask, config.tis_level, config.tis_mode)
        dist.all_reduce(sums, group=self._layout.data_group)
        total, count = sums.tolist()
        mean = total / count if total > LEAST_MEAN_WEIGHT * count else 1.0
        return [replace(micro, mean_weight=mean) for micro in inputs]

    def _measure(self, batch: Sequence[AdvantageInputs]) -> None:
        """One rank speaks for those that know the same of the same samples."""
        if self._distance is None or not self._layout.speaks:
            return
        for one in batch:
            self._distance.add(needed(one.log_probs), needed(one.teacher_log_probs), one.micro.mask)

    def _teacher_log_probs(self, micro: MicroInputs, held: Tensor | None) -> Tensor | None:
        """Held by these ranks, or travelled with the samples."""
        if held is not None or self._distance is None:
            return held
        return micro.put([teacher_log_probs(sample) for sample in micro.samples])


def teacher_log_probs(sample: Sample) -> Tensor:
    """float32 [R], as they travelled with the sample. Raises InvalidArgument for a sample without."""
    column = sample.columns.get(TEACHER_LOG_PROBS)
    if column is None:
        raise InvalidArgument(
            f"sample {sample.sample_id} has no teacher_log_probs for its {sample.response_length} response tokens: "
            "set --opd-teacher-url, or sample.teacher_log_probs in the generate function"
        )
    return torch.from_numpy(column.astype("float32"))
