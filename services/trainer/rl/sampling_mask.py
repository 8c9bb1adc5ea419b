"""The tokens that a micro-batch's tokens were sampled from: as engines returned them, or as the policy would choose.

A sample that came without them gets those of the policy in place, by the rule of SGLang's sampler: sorted by their
probability at the rollout temperature, tokens of rank < top_k that have at most top_p before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.trajectory import SAMPLING_MASK, SAMPLING_MASK_COUNTS, Sample
from services.trainer.rl.algorithms import vocab_parallel
from services.trainer.rl.algorithms.vocab_parallel import KeptTokens


def lacks_mask(sample: Sample) -> bool:
    """True for a sample with trained tokens that no engine returned masks of."""
    return SAMPLING_MASK not in sample.columns and bool(sample.loss_mask.any())


def require_mask(sample: Sample) -> None:
    """Raises InvalidArgument where `lacks_mask`."""
    if lacks_mask(sample):
        raise InvalidArgument(
            f"sample {sample.sample_id} has no {SAMPLING_MASK}: --true-on-policy-mode and --keep-old-actor need those "
            "of headrace's own engines and sampler: start without one of these flags or without --keep-sampling-mask"
        )


def engines_masks(samples: Sequence[Sample], width: int, device: torch.device) -> KeptTokens:
    """The masks that came with the samples; positions are those of the flattened [samples, width]."""
    slots, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for row, sample in enumerate(samples):
        if SAMPLING_MASK in sample.columns:
            counts = sample.columns[SAMPLING_MASK_COUNTS]
            slots.append(np.repeat(np.arange(len(counts)) + row * width, counts))
            ids.append(sample.columns[SAMPLING_MASK].astype(np.int64))
    return KeptTokens(*(torch.from_numpy(np.concatenate(parts)).to(device) for parts in (slots, ids)))


@dataclass(frozen=True, slots=True, eq=False)
class PolicyMask:
    """What the policy chooses for N positions; the token that was sampled is always kept."""

    kept: KeptTokens
    log_mass: Tensor
    """float [N]: the logarithm of the probability that the kept tokens have together"""
    is_outside: Tensor
    """bool [N]: by the rule alone the sampled token would not be kept"""


def policy_mask(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    *,
    top_p: float,
    top_k: int | None,
) -> PolicyMask:
    """Arguments as those of `log_probs_and_entropy`; every rank of `group` gets the same masks."""
    num_ranks = 1 if group is None else dist.get_world_size(group)
    size = max(1, vocab_parallel.CHUNK_ELEMENTS // (len(weight) * num_ranks))
    parts = []
    for start in range(0, max(1, len(hidden)), size):
        rows = slice(start, start + size)
        logits = (hidden[rows] @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
        shares = [torch.empty_like(logits) for _ in range(num_ranks)]
        if group is None:
            shares = [logits]
        else:
            dist.all_gather(shares, logits.contiguous(), group)
        parts.append(_mask_of(torch.cat(shares, -1) / temperature, target[rows], start, top_p, top_k))
    kept = [part.kept for part in parts]
    return PolicyMask(
        KeptTokens(torch.cat([one.positions for one in kept]), torch.cat([one.ids for one in kept])),
        torch.cat([part.log_mass for part in parts]),
        torch.cat([part.is_outside for part in parts]),
    )


def _mask_of(logits: Tensor, target: Tensor, start: int, top_p: float, top_k: int | None) -> PolicyMask:
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    keeps = p.cumsum(-1) - p <= top_p
    if top_k is not None:
        keeps[:, top_k:] = False
    is_target = order == target[:, None]
    is_outside = ~(keeps & is_target).any(-1)
    keeps |= is_target
    positions = keeps.nonzero()[:, 0] + start
    return PolicyMask(KeptTokens(positions, order[keeps]), (p * keeps).sum(-1).log(), is_outside)
