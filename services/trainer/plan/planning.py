"""Cutting a rollout batch into optimizer steps, data ranks and micro-batches, alike on every rank.

Decided from the light facts alone, so ranks agree without talking. Nothing is dropped: uneven steps are allowed, and
where data ranks come out uneven, empty micro-batches keep their collectives in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.trajectory import Status
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.bins import few_bins, fill_in_order, longest_first, spread
from services.trainer.plan.partition import partition
from services.trainer.plan.rows import Packing, row_tokens

Ids = tuple[str, ...]
Cost = Callable[[SampleFacts], int]
Unit = list[SampleFacts]

# With fewer units than this for each data rank, groups are divided so that ranks can be balanced.
_UNITS_PER_RANK = 4
# Differencing balances few units better; of many, the shortest fill up what the longest left uneven, and faster.
_FEW_UNITS = 512
# Data ranks keep equal work for up to 2 % more micro-batches, and give up at most 10 % of it for fewer.
_TOLERATED, _HEAVIER = 1.02, 1.1


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
        return not any(ids for micros in self.by_data_rank for ids in micros)

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
    needs_reward: bool = True
    """Samples without a reward are left out, as failed ones are: the job's loss is made of rewards"""

    def plan(self, samples: Sequence[SampleFacts], num_steps: int) -> list[StepPlan]:
        """`num_steps` plans that hold every sample that can be trained exactly once, in order of the batch.

        Steps get equally many rollouts, for their losses are means over rollouts; a rollout is in one step.
        """
        rollouts: dict[tuple[str, str], list[SampleFacts]] = {}
        for sample in samples:
            if sample.status != Status.FAILED.value and (sample.reward is not None or not self.needs_reward):
                rollouts.setdefault(sample.rollout, []).append(sample)
        whole = list(rollouts.values())
        chunks = np.array_split(np.arange(len(whole)), num_steps)
        return [self._step([sample for i in chunk for sample in whole[i]]) for chunk in chunks]

    def _step(self, samples: Sequence[SampleFacts]) -> StepPlan:
        units = list(self._units(samples))
        cut = [self._micro_batches(share) for share in self._shares(units)]
        if self.cost is not None and self.max_tokens is not None and self.dp_size > 1:
            cut = self._fewer(cut, units, self.cost, self.max_tokens)
        most = self._aligned(max(1, *(len(micros) for micros in cut)))
        ids = [[tuple(s.sample_id for s in micro) for micro in micros] for micros in cut]
        return StepPlan(tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in ids))

    def _aligned(self, count: int) -> int:
        return -(-count // self.multiple_of) * self.multiple_of

    def _shares(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Each data rank's units; balanced ones come longest first, to be padded little."""
        if self.cost is None:
            return [[units[i] for i in part] for part in np.array_split(np.arange(len(units)), self.dp_size)]
        costs = [sum(map(self.cost, unit)) for unit in units]
        parts = (partition if len(units) <= _FEW_UNITS else spread)(costs, self.dp_size)
        return [sorted((units[i] for i in part), key=_longest, reverse=True) for part in parts]

    def _units(self, samples: Sequence[SampleFacts]) -> Iterator[Unit]:
        """Samples that should stay together: those of one prompt where it is shared, else each sample by itself."""
        if self.packing != "shared_prompts":
            yield from ([sample] for sample in samples)
            return
        size = max(1, len(samples) // (_UNITS_PER_RANK * self.dp_size)) if self.dp_size > 1 else len(samples)
        families: dict[tuple[str, int], Unit] = {}
        for sample in samples:
            families.setdefault((sample.group_id, sample.prompt_length), []).append(sample)
        for family in families.values():
            yield from (family[i : i + size] for i in range(0, len(family), size))

    def _micro_batches(self, units: Sequence[Unit]) -> list[Unit]:
        if self.max_tokens is not None:
            return self._fitted(units, self.max_tokens)
        flat = [sample for unit in units for sample in unit]
        return [flat[i : i + self.micro_batch_size] for i in range(0, len(flat), self.micro_batch_size)]

    def _fewer(self, cut: list[list[Unit]], units: Sequence[Unit], cost: Cost, max_tokens: int) -> list[list[Unit]]:
        """`cut`, whose ranks have equal work, or micro-batches that were filled over all ranks where those are fewer.

        With few micro-batches a rank, one more on a single rank is one more for all. Equal work is not given up for it:
        a sample beyond `max_tokens` is the work of several micro-batches.
        """
        fitted = self._fitted(units, max_tokens)
        each = self._aligned(-(-len(fitted) // self.dp_size))
        if each * _TOLERATED >= self._aligned(max(map(len, cut))):
            return cut
        micros = self._evened(units, each * self.dp_size, max_tokens) or fitted
        shares = spread([sum(map(cost, micro)) for micro in micros], self.dp_size, each)
        found = [[micros[i] for i in share] for share in shares]
        return found if _heaviest(found, cost) <= _HEAVIER * _heaviest(cut, cost) else cut

    def _evened(self, units: Sequence[Unit], count: int, max_tokens: int) -> list[Unit] | None:
        """`count` micro-batches of about equal size; None where they do not come out within `max_tokens`."""
        if self.packing == "padded":
            return None
        samples = [sample for unit in units for sample in unit]
        lengths = [_tokens(sample) for sample in samples]
        bins = spread(lengths, count)
        if any(sum(lengths[i] for i in indices) > max_tokens for indices in bins):
            return None
        return [[samples[i] for i in indices] for indices in bins if indices]

    def _fitted(self, units: Sequence[Unit], max_tokens: int) -> list[Unit]:
        """Few micro-batches; samples of one prompt stay together where that makes no more of them."""
        samples = [sample for unit in units for sample in unit]
        lengths = [_tokens(sample) for sample in samples]
        if self.packing == "padded":
            bins = fill_in_order(longest_first(lengths), lengths, max_tokens)
        else:
            bins = few_bins(lengths, max_tokens)
        apart = [[samples[i] for i in indices] for indices in bins]
        if self.packing != "shared_prompts":
            return apart
        whole = [part for unit in units for part in self._divided(unit, max_tokens)]
        together = few_bins([self._row_tokens(unit) for unit in whole], max_tokens)
        if len(together) > len(apart):
            return apart
        return [[sample for i in indices for sample in whole[i]] for indices in together]

    def _divided(self, unit: Unit, max_tokens: int) -> list[Unit]:
        if len(unit) == 1 or self._row_tokens(unit) <= max_tokens:
            return [unit]
        half = len(unit) // 2
        return self._divided(unit[:half], max_tokens) + self._divided(unit[half:], max_tokens)

    def _row_tokens(self, samples: Sequence[SampleFacts]) -> int:
        return row_tokens([(s.group_id, s.prompt_length, s.response_length) for s in samples], self.packing)


def _tokens(sample: SampleFacts) -> int:
    """Row positions of the sample by itself."""
    return sample.prompt_length + sample.response_length - 1


def _heaviest(cut: Sequence[Sequence[Unit]], cost: Cost) -> int:
    """The work of the data rank that has most."""
    return max(sum(cost(sample) for micro in micros for sample in micro) for micros in cut)


def _longest(unit: Unit) -> int:
    return max(s.prompt_length + s.response_length for s in unit)
