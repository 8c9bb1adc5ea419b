"""Log-probs and entropy from hidden states, with a vocabulary that is divided over tensor-parallel ranks.

The output projection, the softmax and the gather are one pass over some positions at a time. Neither logits nor a
softmax are kept for the backward pass when they are large: hidden states and two numbers a token are enough to compute
them again. The online form of softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) makes the forward pass local but
for one maximum and one sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26
"""Bound on the scratch of a chunk of logits: 256 MiB in float32. What fits one chunk is kept for the backward pass."""

LOG_ZERO = -1e4
"""exp of it is exactly 0 in float32 and float64, and unlike -inf it may be multiplied by 0."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The tokens that some positions were sampled from: all of the others have probability 0 there.

    Pairs in any order, int64 [M] both; a position without a pair was sampled from the whole vocabulary.
    """

    positions: Tensor
    """Which of the N positions"""
    ids: Tensor
    """Of the whole vocabulary"""

    def __add__(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(torch.cat((self.positions, other.positions)), torch.cat((self.ids, other.ids)))

    def at(self, chosen: Tensor, num_positions: int) -> KeptTokens:
        """The same for positions `chosen` [N] of these: n stands for position chosen[n], the others are left out."""
        number = torch.full((num_positions,), -1, dtype=torch.int64, device=chosen.device)
        number[chosen] = torch.arange(len(chosen), device=chosen.device)
        found = number[self.positions]
        return KeptTokens(found[found >= 0], self.ids[found >= 0])

    def counts(self, num_positions: int) -> Tensor:
        """How many tokens each position keeps, int64 [N]; 0 stands for the whole vocabulary."""
        return self.positions.bincount(minlength=num_positions)


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """The log π(target) and the entropy of π = softmax(hidden · weightᵀ / temperature), both [N], differentiable.

    `hidden` [N, H] is the same on all ranks of `group`; `weight` [V / tp, H] is this rank's share of the vocabulary, in
    rank order (no group: all of it); `target` int64 [N] holds ids of the whole vocabulary. Results and sums are
    float32, or float64 for float64. The gradient of `hidden` is this rank's part: add it up over the ranks.

    With `kept`, which holds the targets, π is renormalised over these tokens (DeepSeek-V3.2, arXiv:2512.02556, section
    3.1 "Keep Sampling Mask").
    """
    found: tuple[Tensor, Tensor] = _LogProbsAndEntropy.apply(hidden, weight, target, temperature, group, kept)  # type: ignore[no-untyped-call]  # torch's
    return found


class _LogProbsAndEntropy(torch.autograd.Function):
    """Gradients, z = logits / temperature: d log π_t / dz_j = [j = t] - π_j; dH / dz_j = -π_j (log π_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        local_target, here = _localized(target, len(weight), group)
        hide = _Hide.of(kept, len(hidden), len(weight), group)
        chunks = list(_chunks(hidden, weight))
        statistics = []
        for rows in chunks:
            logits = hide(hidden[rows] @ weight.T, rows)
            statistics.append(_local_statistics(logits, local_target[rows], here[rows], temperature))
        top, sums = (torch.cat(parts, dim=-1) for parts in zip(*statistics, strict=True))
        log_z, log_probs, entropy = _combined(top, sums, group)
        only_chunk = logits if len(chunks) == 1 else None
        ctx.save_for_backward(hidden, weight, local_target, here, log_z, entropy, only_chunk)
        ctx.temperature, ctx.hide = temperature, hide
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, target, here, log_z, entropy, only_chunk = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        for rows in _chunks(hidden, weight):
            logits = ctx.hide(hidden[rows] @ weight.T, rows) if only_chunk is None else only_chunk
            log_p = _scaled(logits, ctx.temperature).sub_(log_z[rows, None]).clamp_(min=LOG_ZERO)
            p = log_p.exp()
            slope = torch.zeros_like(log_z[rows]) if grad_log_probs is None else -grad_log_probs[rows]
            if grad_entropy is None:
                p.mul_(slope[:, None])
            else:
                p.mul_(log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(slope[:, None]))
            if grad_log_probs is not None:
                p.scatter_add_(1, target[rows, None], (grad_log_probs[rows] * here[rows])[:, None])
            grad_logits = p.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            part = grad_logits.T @ hidden[rows]
            grad_weight = part if grad_weight is None else grad_weight.to(log_z.dtype).add_(part)
        assert grad_weight is not None  # there is at least one chunk
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Hide:
    """Gives -inf to the logits of tokens that were not kept, in place. `is_narrowed` None: all were kept everywhere."""

    is_narrowed: Tensor | None
    positions: Tensor
    local_ids: Tensor

    @classmethod
    def of(cls, kept: KeptTokens | None, size: int, share: int, group: dist.ProcessGroup | None) -> _Hide:
        if kept is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return cls(None, nothing, nothing)
        is_narrowed = torch.zeros(size, dtype=torch.bool, device=kept.positions.device)
        is_narrowed[kept.positions] = True
        local_ids, here = _localized(kept.ids, share, group)
        return cls(is_narrowed, kept.positions[here], local_ids[here])

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        if self.is_narrowed is None:
            return logits
        is_in = (self.positions >= rows.start) & (self.positions < rows.stop)
        is_hidden = self.is_narrowed[rows, None].expand(logits.shape).clone()
        is_hidden[self.positions[is_in] - rows.start, self.local_ids[is_in]] = False
        return logits.masked_fill_(is_hidden, -torch.inf)


def _localized(target: Tensor, share: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The targets as indices into this rank's share (0 for others'), and which of them it holds."""
    first = dist.get_rank(group) * share if group is not None else 0
    here = (target >= first) & (target < first + share)
    return torch.where(here, target - first, 0), here


def _local_statistics(logits: Tensor, target: Tensor, here: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """This share's maximum m [N], and [3, N]: Σ e^(z-m), Σ e^(z-m) (z-m), and z of the target or 0."""
    z = _scaled(logits, temperature)
    top = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)
    at_target = torch.where(here, z.gather(1, target[:, None])[:, 0], 0.0)
    z.sub_(top[:, None]).clamp_(min=LOG_ZERO)
    e = z.exp()
    return top, torch.stack((e.sum(-1), z.mul_(e).sum(-1), at_target))


def _combined(top: Tensor, sums: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """The values log Σ e^z, log π of the target and the entropy over all shares, each [N]."""
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


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Returns at least one chunk, which is empty where there is no position."""
    size = max(1, CHUNK_ELEMENTS // len(weight))
    return (slice(start, start + size) for start in range(0, max(1, len(hidden)), size))
