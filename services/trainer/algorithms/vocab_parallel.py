"""Log-probs and entropy from logits whose vocabulary is divided over tensor-parallel ranks.

No rank ever holds a whole row and no softmax is kept for the backward pass: the logits themselves and two numbers a
token are enough to compute it again, some rows at a time. The online form of softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867) makes the forward pass local but for one maximum and one sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26
"""Bound on the float32 scratch of a chunk of rows: 256 MiB."""

LOG_ZERO = -1e4
"""exp of it is exactly 0 in float32 and float64, and unlike -inf it may be multiplied by 0."""


def log_probs_and_entropy(
    logits: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy of π = softmax(logits / temperature), both [...], differentiable.

    `logits` [..., V / tp] are this rank's share, in rank order, of the vocabulary of `group` (None: all of it);
    `target` int64 [...] holds ids of the whole vocabulary. Float32 inside and out, float64 for float64 logits.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    log_probs, entropy = _LogProbsAndEntropy.apply(rows, target.reshape(-1), temperature, group)  # type: ignore[no-untyped-call]
    return log_probs.view(target.shape), entropy.view(target.shape)


class _LogProbsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature: d log π_t / dz_j = [j = t] - π_j; dH / dz_j = -π_j (log π_j + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        local_target, here = _localized(target, logits.shape[-1], group)
        top, sums = _local_statistics(logits, local_target, here, temperature)
        log_z, log_probs, entropy = _combined(top, sums, group)
        ctx.save_for_backward(logits, local_target, here, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, local_target, here, log_z, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = _scaled(logits[rows], ctx.temperature).sub_(log_z[rows, None]).clamp_(min=LOG_ZERO)
            p = log_p.exp()
            slope = torch.zeros_like(log_z[rows]) if grad_log_probs is None else -grad_log_probs[rows]
            if grad_entropy is None:
                p.mul_(slope[:, None])
            else:
                p.mul_(log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(slope[:, None]))
            if grad_log_probs is not None:
                p.scatter_add_(1, local_target[rows, None], (grad_log_probs[rows] * here[rows])[:, None])
            grad[rows] = p.div_(ctx.temperature)
        return grad, None, None, None


def _localized(target: Tensor, share: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The targets as indices into this rank's share (0 for others'), and which of them it holds."""
    first = dist.get_rank(group) * share if group is not None else 0
    here = (target >= first) & (target < first + share)
    return torch.where(here, target - first, 0), here


def _local_statistics(logits: Tensor, target: Tensor, here: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Of this share: the maximum m [N], and [3, N]: Σ e^(z-m), Σ e^(z-m) (z-m), and z of the target or 0."""
    tops, sums = [], []
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        top = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)
        at_target = torch.where(here[rows], z.gather(1, target[rows, None])[:, 0], 0.0)
        z.sub_(top[:, None]).clamp_(min=LOG_ZERO)
        e = z.exp()
        tops.append(top)
        sums.append(torch.stack((e.sum(-1), z.mul_(e).sum(-1), at_target)))
    return torch.cat(tops), torch.cat(sums, dim=1)


def _combined(top: Tensor, sums: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """log Σ e^z, log π of the target and the entropy over all shares, each [N]."""
    if group is not None and dist.get_world_size(group) > 1:
        local_top, top = top, top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        moved = (local_top - top).clamp_(min=LOG_ZERO)
        weight = moved.exp()
        sums = torch.stack((sums[0] * weight, (sums[1] + sums[0] * moved) * weight, sums[2]))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    total, weighted, at_target = sums
    log_total = total.log()
    # The maximum is taken off first: beside logits of 3e4, log Σ has no digits left in float32.
    return top + log_total, (at_target - top) - log_total, log_total - weighted / total


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A fresh tensor, so that what follows may work in place."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype, copy=True).div_(temperature)


def _chunks(logits: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))
