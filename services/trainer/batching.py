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
    """B samples padded on the right to S positions; position t speaks of token t + 1. On the CPU."""

    sample_ids: Ids
    tokens: Tensor
    """int64 [B, S]"""
    position_ids: Tensor
    """int64 [B, S]"""
    targets: Tensor
    """int64 [B, S]: the token that follows"""
    loss_mask: Tensor
    """uint8 [B, S]: 1 where the target is trained"""
    rollout_log_probs: Tensor
    """float32 [B, S]: the target's, 0 where there is none"""


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """At least one sample. The last token is only a target, so S is the longest length less one."""
    size = max(len(s.tokens) - 1 for s in samples)
    shape = (len(samples), size)
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.uint8)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    for row, sample in enumerate(samples):
        end = len(sample.tokens) - 1
        # A response without a prompt has no position that predicts its first token.
        lost = max(0, sample.response_length - end)
        start = end - (sample.response_length - lost)
        tokens[row, :end] = torch.from_numpy(sample.tokens[:-1].astype(np.int64))
        targets[row, :end] = torch.from_numpy(sample.tokens[1:].astype(np.int64))
        mask[row, start:end] = torch.from_numpy(sample.loss_mask[lost:].copy())
        log_probs[row, start:end] = torch.from_numpy(sample.rollout_log_probs[lost:].copy())
    return MicroBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        tokens=tokens,
        position_ids=torch.arange(size).expand(shape).contiguous(),
        targets=targets,
        loss_mask=mask,
        rollout_log_probs=log_probs,
    )


def empty_micro_batch() -> MicroBatch:
    """One row, nothing to train: for a data rank that has fewer than the others."""
    shape = (1, 1)
    return MicroBatch(
        sample_ids=("",),
        tokens=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        targets=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.uint8),
        rollout_log_probs=torch.zeros(shape, dtype=torch.float32),
    )
