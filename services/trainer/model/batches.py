"""A rollout step as one rank trains it: its samples, read, and laid out for every optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.job.schema.training import TrainSection
from headrace.trajectory import Sample
from services.trainer.data.reading import FetchSamples, Readable, SampleReader, UnusableSample, all_readable
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.experts import RolloutChoices
from services.trainer.plan.planning import Planner, StepPlan
from services.trainer.plan.rows import Packing
from services.trainer.rl.inputs import StepInputs, step_inputs
from services.trainer.rl.rewards import RewardPostProcess, shaped_rewards


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """`plans` and `inputs` have one entry for each optimizer step."""

    samples: Sequence[SampleFacts]
    """All of the rollout batch, equal on all ranks; those that were set aside are FAILED"""
    set_aside: Sequence[UnusableSample]
    """Samples that could not be used, equal on all ranks"""
    plans: Sequence[StepPlan]
    inputs: Sequence[StepInputs]


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
        rewards: RewardPostProcess | None,
        choices: RolloutChoices | None,
    ) -> None:
        self._config = config
        self._steps_per_rollout = config.num_steps_per_rollout or 1
        self._planner = planner
        self._reader = SampleReader(self.own_sample_ids, check, layout)
        self._layout = layout
        self._packing = packing
        self._rewards = rewards
        self._choices = choices

    def own_sample_ids(self, samples: Sequence[SampleFacts]) -> list[str]:
        """The ids of the samples that `read` will fetch on this rank, in that order."""
        plans = self._planner.plan(samples, self._steps_per_rollout)
        return [sample_id for plan in plans for sample_id in plan.sample_ids(self._layout.data_rank)]

    def read(self, step: int, samples: Sequence[SampleFacts], fetch: FetchSamples) -> RolloutBatch:
        """Collective: fetches this rank's samples, and puts them onto its device."""
        read = self._reader.read(samples, fetch)
        plans = self._planner.plan(read.samples, self._steps_per_rollout)
        return RolloutBatch(read.samples, read.set_aside, plans, self._inputs(step, plans, read, fetch))

    def _inputs(self, step: int, plans: Sequence[StepPlan], read: Readable, fetch: FetchSamples) -> list[StepInputs]:
        if self._rewards is None:
            rewards = shaped_rewards(read.samples, self._config)
        else:
            rewards = self._rewards(read.samples, lambda sample_ids: all_readable(fetch(sample_ids)))
        return [
            step_inputs(
                *(plan, step, read.samples, rewards, read.own, self._config),
                *(self._layout, self._packing, self._choices),
            )
            for plan in plans
        ]
