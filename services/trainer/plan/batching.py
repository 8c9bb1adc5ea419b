"""The samples of a micro-batch as tensors: rows for the model, and the answers that are trained beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.trajectory import Sample
from services.trainer.plan.planning import Ids
from services.trainer.plan.rows import NOBODY, Packing, Rows, pack


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for the model, and n answers beside them: column t speaks of a response's token t. On the CPU."""

    sample_ids: Ids
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
        sample_ids=tuple(s.sample_id for s in samples),
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
        sample_ids=("",),
        samples=(),
        rows=Rows(one, one, None),
        logit_positions=one[0],
        target_slots=one[0],
        targets=one,
        loss_mask=one.to(torch.uint8),
        rollout_log_probs=one.to(torch.float32),
        sample_numbers=one + NOBODY,
    )
