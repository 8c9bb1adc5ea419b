"""Log-probs of given tokens and the entropy, from logits whose vocabulary is cut over tensor ranks, in one pass.

With z = logits / temperature, Z = Σ e^z: log p(y) = z_y − log Z and H = log Z − Σ p·z. Backward:
∂log p(y)/∂z_i = 1[i = y] − p_i and ∂H/∂z_i = −p_i (z_i − Σ p·z). Everything in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """logits [..., V / tp] and targets int64 [...] → (log-probs [...], entropy [...]), float32, equal on tensor ranks.

    `group` is the tensor-parallel group; None, or a group of one, when the vocabulary is whole.
    """
    found: tuple[Tensor, Tensor] = _LogProbsAndEntropy.apply(logits, targets, group, temperature)  # type: ignore[no-untyped-call]
    return found


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        z = logits.to(_working_dtype(logits)) / temperature
        largest = z.amax(dim=-1)
        _reduce(largest, group, dist.ReduceOp.MAX)
        z -= largest.unsqueeze(-1)
        local, is_local = _local_targets(targets, z.shape[-1], group)
        exponents = z.exp()
        # Three sums over the vocabulary in one collective: e^z, e^z·z and z at the target.
        sums = torch.stack(
            [
                exponents.sum(dim=-1),
                (exponents * z).sum(dim=-1),
                z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local, 0.0),
            ]
        )
        _reduce(sums, group, dist.ReduceOp.SUM)
        total, weighted, at_target = sums
        log_total = total.log()
        mean = weighted / total
        probabilities = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, is_local, log_total, mean)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return at_target - log_total, log_total - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        grad_log_probs, grad_entropy = gradients
        probabilities, local, is_local, log_total, mean = ctx.saved_tensors
        # log p + log Z is z again, so logits need not be kept beside the probabilities.
        z = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log() + log_total.unsqueeze(-1)
        grad = -probabilities * (grad_log_probs.unsqueeze(-1) + grad_entropy.unsqueeze(-1) * (z - mean.unsqueeze(-1)))
        grad.scatter_add_(-1, local.unsqueeze(-1), (grad_log_probs * is_local).unsqueeze(-1))
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None


def _working_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _local_targets(targets: Tensor, size: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    rank = 0 if group is None else dist.get_rank(group)
    local = targets - rank * size
    is_local = (local >= 0) & (local < size)
    return local.clamp(0, size - 1), is_local


def _reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
