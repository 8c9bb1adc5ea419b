"""Cuts a rollout batch into optimizer steps, data ranks and micro-batches, alike on every rank, balanced by cost.

Decided from the light facts alone, so ranks agree without talking. Nothing is dropped: uneven steps are allowed, and
where data ranks come out uneven, empty micro-batches keep their collectives in step. A sample's cost is the number of
floating-point operations of a model, by formula: two for each multiplication of its matrix products. Attention counts
the pairs of a token and those it sees, so causal attention is half a square. Norms, activations, rotations, softmax
and routing are left out: they are less than a hundredth.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Architecture, Mamba
from headrace.models.registry import table
from headrace.trajectory import Sample, Status
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.rows import NOBODY, Packing, Rows, pack, row_tokens


def partition(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """`num_parts` lists of indices into `costs`, each in ascending order; the same answer for the same numbers.

    The largest differencing method (Karmarkar and Karp 1982): the two partial partitions that are most uneven are laid
    upon each other, the heaviest part of one on the lightest of the other, until one is left. The library for it on
    PyPI (numberpartitioning) has not moved since 2021.
    """
    tie = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, cost in enumerate(costs):
        parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - 1)]
        heap.append((-cost, next(tie), [*parts, (cost, [index])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = sorted(
            ((a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)),
            key=lambda part: part[0],
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(tie), merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


# Differencing merges all bins for each item. With many of both, best fit is close to the fewest bins anyway.
_MOST_MERGES = 8192


def longest_first(costs: Sequence[int]) -> list[int]:
    """Indices by descending cost; equal ones as they come."""
    return sorted(range(len(costs)), key=lambda i: -costs[i])


def best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Lists of indices, each at most `capacity` together; what alone has more is alone.

    Best fit, longest first: each goes where the least room is left behind it (at most 11/9 of the fewest bins; Johnson
    1974, "Fast algorithms for bin packing").
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in longest_first(costs):
        found = bisect_left(rooms, (costs[index], -1))
        if found < len(rooms):
            room, home = rooms.pop(found)
            bins[home].append(index)
        else:
            room, home = capacity, len(bins)
            bins.append([index])
        if room > costs[index]:
            insort(rooms, (room - costs[index], home))
    return bins


def few_bins(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Like `best_fit`, in fewer bins where equal sums (`partition`) fit into fewer."""
    bins = best_fit(costs, capacity)
    alone = [[i] for i, cost in enumerate(costs) if cost > capacity]
    others = [i for i, cost in enumerate(costs) if cost <= capacity]
    fewest = -(-sum(costs[i] for i in others) // capacity)
    while len(bins) - len(alone) > fewest and len(others) * len(bins) <= _MOST_MERGES:
        fewer = partition([costs[i] for i in others], len(bins) - len(alone) - 1)
        if any(sum(costs[others[i]] for i in part) > capacity for part in fewer):
            break
        bins = alone + [[others[i] for i in part] for part in fewer]
    return bins


def fill_in_order(order: Iterable[int], costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of consecutive items of `order`, longest first, for rows in which each item costs as much as the longest."""
    bins: list[list[int]] = []
    slots = 0
    for index in order:
        if not slots:
            slots = max(1, capacity // max(costs[index], 1))
            bins.append([])
        bins[-1].append(index)
        slots -= 1
    return bins


def spread(costs: Sequence[int], num_bins: int, most: int | None = None) -> list[list[int]]:
    """`num_bins` lists of indices with sums about equal, each of `most` at most: longest first, to the least full."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index in longest_first(costs):
        total, home = heapq.heappop(heap)
        bins[home].append(index)
        if most is None or len(bins[home]) < most:
            heapq.heappush(heap, (total + costs[index], home))
    return bins


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
        return [sample_id for ids in self.by_data_rank[dp_rank] for sample_id in ids]

    @property
    def is_empty(self) -> bool:
        """True when every sample of it failed: there is nothing to learn, so no weight moves."""
        return not any(ids for micros in self.by_data_rank for ids in micros)

    @property
    def all_sample_ids(self) -> frozenset[str]:
        return frozenset(i for rank in range(len(self.by_data_rank)) for i in self.sample_ids(rank))


@dataclass(frozen=True, slots=True)
class Planner:
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
        lengths = [_row_positions(sample) for sample in samples]
        bins = spread(lengths, count)
        if any(sum(lengths[i] for i in indices) > max_tokens for indices in bins):
            return None
        return [[samples[i] for i in indices] for indices in bins if indices]

    def _fitted(self, units: Sequence[Unit], max_tokens: int) -> list[Unit]:
        """Few micro-batches; samples of one prompt stay together where that makes no more of them."""
        samples = [sample for unit in units for sample in unit]
        lengths = [_row_positions(sample) for sample in samples]
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


def _row_positions(sample: SampleFacts) -> int:
    """Row positions of the sample by itself."""
    return sample.prompt_length + sample.response_length - 1


def _heaviest(cut: Sequence[Sequence[Unit]], cost: Cost) -> int:
    return max(sum(cost(sample) for micro in micros for sample in micro) for micros in cut)


def _longest(unit: Unit) -> int:
    return max(s.prompt_length + s.response_length for s in unit)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The operations of a forward pass; a backward pass needs twice as many."""

    per_token: int
    """Operations of a token in all layers, without attention's products."""
    per_pair: int
    """Operations of a token with one that it sees: its score and its weighted value, in all layers and heads."""
    per_projection: int
    """Operations of the output layer for a token whose successor is predicted."""

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFlops:
        a, mla, linear = architecture, architecture.latent_attention, architecture.linear_attention
        head = a.kv_channels * 2 if mla is None else mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim
        num_linear, num_alone = len(linear.layers) if linear else 0, len(a.mlp_layers or ())
        states = 0
        if isinstance(linear, Mamba):  # a state is written, and read by C
            states = 2 * linear.num_heads * linear.head_dim * linear.state_size
        elif linear is not None:  # a state is read by a key, written, and read by a query
            states = 3 * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
        return cls(
            per_token=2 * (_multiplications(a) + num_linear * states),
            per_pair=2 * (a.num_layers - num_linear - num_alone) * a.num_attention_heads * head,
            per_projection=2 * a.hidden_size * a.vocab_size,
        )

    def forward(self, tokens: int, pairs: int, projections: int) -> int:
        return tokens * self.per_token + pairs * self.per_pair + projections * self.per_projection

    def training(self, samples: Iterable[tuple[int, int]]) -> int:
        """Forward and backward of whole samples: (tokens, response tokens) of each."""
        return 3 * sum(
            self.forward(tokens, tokens * (tokens + 1) // 2, response_tokens) for tokens, response_tokens in samples
        )


def _multiplications(architecture: Architecture) -> int:
    """Multiplications of a token with the matrices of all layers, of experts only its own."""
    layers = table(architecture)
    shared = of_experts = 0
    for row in (row for layer in range(architecture.num_layers) for row in layers.layer(layer)):
        size = sum(math.prod(tensor.shape) for tensor in row.hf if len(tensor.shape) > 1)
        if row.expert is None:
            shared += size
        else:
            of_experts += size
    experts = architecture.experts
    return shared + (of_experts * experts.topk // experts.count if experts else 0)


def cost_of(config: TrainSection) -> Cost | None:
    """A sample's tokens, by which data ranks are balanced; None when the job does not balance."""
    return _num_tokens if config.balance_data else None


def _num_tokens(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for the model, and n answers beside them: column t speaks of a response's token t. On the CPU."""

    samples: Sequence[Sample]
    """One a row of what follows; none where there is nothing to train"""
    rows: Rows
    logit_positions: Tensor
    """int64 [N]: positions of the flattened rows that predict a token of an answer"""
    target_slots: Tensor
    """int64 [N]: where that token is in the flattened [n, R]"""
    targets: Tensor
    """int64 [n, R]: the responses' tokens"""
    loss_mask: Tensor
    """uint8 [n, R]: 1 where a token is trained"""
    rollout_log_probs: Tensor
    """float32 [n, R], 0 where there is none"""
    sample_numbers: Tensor
    """int64 [B, S]: whose token a position of the rows holds; -1: nobody's"""


def collate(samples: Sequence[Sample], packing: Packing) -> MicroBatch:
    """The micro-batch of at least one sample; R is the longest response."""
    packed = pack(samples, packing)
    shape = (len(samples), max(1, *(s.response_length for s in samples)))
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.uint8)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    target_slots = []
    for row, (sample, logit_positions) in enumerate(zip(samples, packed.logit_positions, strict=True)):
        size = sample.response_length
        # A response without a prompt loses its first token, which nothing predicts.
        first = size - len(logit_positions)
        targets[row, :size] = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))
        mask[row, first:size] = torch.from_numpy(sample.loss_mask[first:].copy())
        log_probs[row, first:size] = torch.from_numpy(sample.rollout_log_probs[first:].copy())
        target_slots.append(np.arange(first, size) + row * shape[1])
    return MicroBatch(
        samples=tuple(samples),
        rows=packed.rows,
        logit_positions=torch.from_numpy(np.concatenate(packed.logit_positions)),
        target_slots=torch.from_numpy(np.concatenate(target_slots)),
        targets=targets,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        sample_numbers=packed.sample_numbers,
    )


def empty_micro_batch() -> MicroBatch:
    """One row, nothing to train: for a data rank that has fewer than the others."""
    one = torch.zeros((1, 1), dtype=torch.int64)
    return MicroBatch(
        samples=(),
        rows=Rows(one, one, None),
        logit_positions=one[0],
        target_slots=one[0],
        targets=one,
        loss_mask=one.to(torch.uint8),
        rollout_log_probs=one.to(torch.float32),
        sample_numbers=one + NOBODY,
    )
