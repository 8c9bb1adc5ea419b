"""Cutting a rollout batch into optimizer steps, data ranks and micro-batches, alike on every rank, and padding them.

Decided from the light facts alone, so ranks agree without talking. Nothing is dropped: uneven steps are allowed, and
where data ranks come out uneven, empty micro-batches keep their collectives in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.trajectory import Sample, Status
from services.trainer.batch import SampleFacts
from services.trainer.rows import Packing, Rows, lay

Ids = tuple[str, ...]


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
    def all_sample_ids(self) -> frozenset[str]:
        """All of the step."""
        return frozenset(i for rank in range(len(self.by_data_rank)) for i in self.sample_ids(rank))


def plan_steps(
    samples: Sequence[SampleFacts], *, num_steps: int, dp_size: int, micro_batch_size: int
) -> list[StepPlan]:
    """`num_steps` plans that hold every sample that did not fail exactly once, in order of the batch."""
    usable = [s for s in samples if s.status != Status.FAILED.value]
    return [
        _plan([usable[i] for i in chunk], dp_size, micro_batch_size)
        for chunk in np.array_split(np.arange(len(usable)), num_steps)
    ]


def _plan(samples: Sequence[SampleFacts], dp_size: int, micro_batch_size: int) -> StepPlan:
    shares = _balance(samples, dp_size)
    cut = [[tuple(share[i : i + micro_batch_size]) for i in range(0, len(share), micro_batch_size)] for share in shares]
    most = max(1, *(len(micros) for micros in cut))
    return StepPlan(tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in cut))


def _balance(samples: Sequence[SampleFacts], dp_size: int) -> list[list[str]]:
    """Longest first, to the lightest rank that has room; so a rank's samples are sorted by length and pad little."""
    room = -(-len(samples) // dp_size)
    shares: list[list[str]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for sample in sorted(samples, key=lambda s: (-_length(s), s.sample_id)):
        rank = min((r for r in range(dp_size) if len(shares[r]) < room), key=lambda r: (loads[r], r))
        shares[rank].append(sample.sample_id)
        loads[rank] += _length(sample)
    return shares


def _length(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for the model, and n answers beside them: column t speaks of a response's token t. On the CPU."""

    sample_ids: Ids
    rows: Rows
    sources: Tensor
    """int64 [N]: positions of the flattened rows that predict a token of an answer"""
    places: Tensor
    """int64 [N]: where that token is in the flattened [n, R]"""
    targets: Tensor
    """int64 [n, R]: the responses' tokens"""
    loss_mask: Tensor
    """uint8 [n, R]: 1 where a token is trained"""
    rollout_log_probs: Tensor
    """float32 [n, R], 0 where there is none"""


def collate(samples: Sequence[Sample], packing: Packing) -> MicroBatch:
    """At least one sample; R is the longest response."""
    laid = lay(samples, packing)
    shape = (len(samples), max(1, *(s.response_length for s in samples)))
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.uint8)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    places = []
    for row, (sample, sources) in enumerate(zip(samples, laid.sources, strict=True)):
        size = sample.response_length
        # A response without a prompt loses its first token, which nothing predicts.
        first = size - len(sources)
        targets[row, :size] = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))
        mask[row, first:size] = torch.from_numpy(sample.loss_mask[first:].copy())
        log_probs[row, first:size] = torch.from_numpy(sample.rollout_log_probs[first:].copy())
        places.append(np.arange(first, size) + row * shape[1])
    return MicroBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        rows=laid.rows,
        sources=torch.from_numpy(np.concatenate(laid.sources)),
        places=torch.from_numpy(np.concatenate(places)),
        targets=targets,
        loss_mask=mask,
        rollout_log_probs=log_probs,
    )


def empty_micro_batch() -> MicroBatch:
    """One row, nothing to train: for a data rank that has fewer than the others."""
    one = torch.zeros((1, 1), dtype=torch.int64)
    return MicroBatch(
        sample_ids=("",),
        rows=Rows(one, one, None),
        sources=one[0],
        places=one[0],
        targets=one,
        loss_mask=one.to(torch.uint8),
        rollout_log_probs=one.to(torch.float32),
    )
