"""A rollout step as one rank trains it: its samples, read, and laid out for every optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.data.reading import FetchSamples, SampleReader, UnusableSample, all_readable
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.experts import RolloutChoices
from services.trainer.plan.planning import Planner, StepPlan
from services.trainer.plan.rows import Packing
from services.trainer.rl.inputs import StepInputs, step_inputs
from services.trainer.rl.rewards import shaped_rewards
from services.trainer.rl.whole_batch import BatchChanges, WholeBatchHooks


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
    """Numbers that users' functions report with the step"""
    is_logged: bool
    """A user's function has logged the rollout"""


class BatchReader:
    """`check` raises InvalidArgument for a sample that this model and this job cannot be trained on."""

    def __init__(
        self,
        config: TrainSection,
        planner: Planner,
        check: Callable[[Sample], None],
        layout: Layout,
        packing: Packing,
        *,
        hooks: WholeBatchHooks | None,
        choices: RolloutChoices | None,
        vision: Vision | None = None,
    ) -> None:
        self._config = config
        self._steps_per_rollout = config.num_steps_per_rollout or 1
        self._planner = planner
        self._reader = SampleReader(self.own_sample_ids, check, layout)
        self._layout = layout
        self._packing = packing
        self._hooks = hooks
        self._choices = choices
        self._vision = vision

    def own_sample_ids(self, samples: Sequence[SampleFacts]) -> list[str]:
        """The ids of the samples that `read` will fetch on this rank, in that order."""
        plans = self._planner.plan(samples, self._steps_per_rollout)
        return [sample_id for plan in plans for sample_id in plan.sample_ids(self._layout.data_rank)]

    def read(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> RolloutBatch:
        """Collective: fetches this rank's samples, and puts them onto its device."""
        read = self._reader.read(samples, fetch)
        changes = BatchChanges()
        if self._hooks is not None:
            changes = self._hooks(step, read.samples, lambda sample_ids: all_readable(fetch(sample_ids)))
        facts = [changes.of_facts(sample) for sample in read.samples]
        own = {sample_id: changes.of_sample(sample) for sample_id, sample in read.own.items()}
        rewards = changes.reward_of_each(facts) or shaped_rewards(facts, self._config)
        plans = self._planner.plan(facts, self._steps_per_rollout)
        how = (self._config, self._layout, self._packing, self._choices, self._vision)
        inputs = [step_inputs(plan, step, facts, rewards, own, *how) for plan in plans]
        return RolloutBatch(facts, read.set_aside, plans, inputs, changes.metrics, changes.is_logged)
