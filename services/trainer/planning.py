"""Cutting a rollout batch into optimizer steps, data ranks and micro-batches, alike on every rank.

Decided from the light facts alone, so ranks agree without talking. Nothing is dropped: uneven steps are allowed, and
where data ranks come out uneven, empty micro-batches keep their collectives in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.trajectory import Status
from services.trainer.batch import SampleFacts
from services.trainer.partition import partition
from services.trainer.rows import Packing, row_tokens

Ids = tuple[str, ...]
Cost = Callable[[SampleFacts], int]
Unit = list[SampleFacts]

# With fewer units than this for each data rank, groups are divided so that ranks can be balanced.
_UNITS_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: for each data rank its micro-batches of sample ids; () is an empty one."""

    by_data_rank: tuple[tuple[Ids, ...], ...]

    def micro_batches(self, dp_rank: int) -> tuple[Ids, ...]:
        """Equally many on every data rank."""
        return self.by_data_rank[dp_rank]

    def sample_ids(self, dp_rank: int) -> list[str]:
        """All of one data rank."""
        return [sample_id for ids in self.by_data_rank[dp_rank] for sample_id in ids]

    @property
    def is_empty(self) -> bool:
        """True when every sample of it failed: there is nothing to learn, so no weight moves."""
        return not self.all_sample_ids

    @property
    def all_sample_ids(self) -> frozenset[str]:
        """All of the step."""
        return frozenset(i for rank in range(len(self.by_data_rank)) for i in self.sample_ids(rank))


@dataclass(frozen=True, slots=True)
class Planner:
    """The job's way of cutting."""

    dp_size: int
    packing: Packing
    micro_batch_size: int
    """Samples in a micro-batch, where `max_tokens` does not decide"""
    max_tokens: int | None
    """Row positions in a micro-batch at most; a sample that alone has more is alone in one"""
    cost: Cost | None
    """What data ranks should have equally much of; None: they get samples as they come"""
    multiple_of: int = 1
    """The number of micro-batches is a multiple of it"""

    def plan(self, samples: Sequence[SampleFacts], num_steps: int) -> list[StepPlan]:
        """`num_steps` plans that hold every sample that did not fail exactly once, in order of the batch.

        Steps get equally many rollouts, for their losses are means over rollouts; a rollout is in one step.
        """
        rollouts: dict[tuple[str, str], list[SampleFacts]] = {}
        for sample in samples:
            if sample.status != Status.FAILED.value:
                rollouts.setdefault(sample.rollout, []).append(sample)
        whole = list(rollouts.values())
        chunks = np.array_split(np.arange(len(whole)), num_steps)
        return [self._step([sample for i in chunk for sample in whole[i]]) for chunk in chunks]

    def _step(self, samples: Sequence[SampleFacts]) -> StepPlan:
        cut = [self._micro_batches(share) for share in self._shares(samples)]
        most = max(1, *(len(micros) for micros in cut))
        most = -(-most // self.multiple_of) * self.multiple_of
        return StepPlan(tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in cut))

    def _shares(self, samples: Sequence[SampleFacts]) -> list[list[Unit]]:
        """Each data rank's units; balanced ones come longest first, to be padded little."""
        units = list(self._units(samples))
        if self.cost is None:
            return [[units[i] for i in part] for part in np.array_split(np.arange(len(units)), self.dp_size)]
        parts = partition([sum(map(self.cost, unit)) for unit in units], self.dp_size)
        return [sorted((units[i] for i in part), key=_longest, reverse=True) for part in parts]

    def _units(self, samples: Sequence[SampleFacts]) -> Iterator[Unit]:
        """What should stay together: samples of one prompt where it is shared, else each sample by itself."""
        size = max(1, len(samples) // (_UNITS_PER_RANK * self.dp_size)) if self.dp_size > 1 else len(samples)
        families: dict[tuple[str, int], Unit] = {}
        for number, sample in enumerate(samples):
            shared = self.packing == "shared_prompts"
            key = (sample.group_id, sample.prompt_length) if shared else (sample.sample_id, number)
            families.setdefault(key, []).append(sample)
        for family in families.values():
            yield from (family[i : i + size] for i in range(0, len(family), size))

    def _micro_batches(self, units: Sequence[Unit]) -> list[Ids]:
        if self.max_tokens is None:
            flat = [sample for unit in units for sample in unit]
            size = self.micro_batch_size
            found = [flat[i : i + size] for i in range(0, len(flat), size)]
        else:
            found = self._fitted(units, self.max_tokens)
        return [tuple(s.sample_id for s in micro) for micro in found]

    def _fitted(self, units: Sequence[Unit], max_tokens: int) -> list[Unit]:
        """First fit, longest first; a unit that is too long for a micro-batch of its own is divided."""
        fitting = [unit for whole in units for unit in self._divided(whole, max_tokens)]
        micros: list[Unit] = []
        for unit in sorted(fitting, key=self._tokens, reverse=True):
            home = next((micro for micro in micros if self._tokens([*micro, *unit]) <= max_tokens), None)
            if home is None:
                micros.append(list(unit))
            else:
                home += unit
        return micros

    def _divided(self, unit: Unit, max_tokens: int) -> list[Unit]:
        if len(unit) == 1 or self._tokens(unit) <= max_tokens:
            return [unit]
        half = len(unit) // 2
        return self._divided(unit[:half], max_tokens) + self._divided(unit[half:], max_tokens)

    def _tokens(self, samples: Sequence[SampleFacts]) -> int:
        return row_tokens([(s.group_id, s.prompt_length, s.response_length) for s in samples], self.packing)


def _longest(unit: Unit) -> int:
    return max(s.prompt_length + s.response_length for s in unit)
