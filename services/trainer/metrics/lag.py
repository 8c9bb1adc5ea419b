"""The distance of trainer and engines in log-probs, by the staleness of a sample's oldest token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_LAG = 8
"""Everything older is counted as so old."""


class LogProbDistance:
    """Adds up over the micro-batches of a rollout step; `read` is collective."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, LARGEST_LAG + 1, dtype=torch.float64, device=device)
        self._largest = torch.zeros(LARGEST_LAG + 1, dtype=torch.float64, device=device)

    def add(self, before: Tensor, rollout: Tensor, mask: Tensor, lags: Tensor) -> None:
        """Log-probs of trainer and engine [B, S], 1 where a token is trained [B, S], and each sample's lag [B, 1]."""
        distance = ((before - rollout).abs() * mask).double()
        lag = lags[:, 0].long().clamp(0, LARGEST_LAG)
        self._sums[0].index_add_(0, lag, distance.sum(1))
        self._sums[1].index_add_(0, lag, mask.sum(1).double())
        self._largest.scatter_reduce_(0, lag, distance.amax(1), "amax")

    def read(self) -> dict[str, float]:
        """Mean and maximum for each lag that there was, over all ranks, since the last read."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found = {}
        for lag, (total, tokens, largest) in enumerate(zip(*self._sums.tolist(), self._largest.tolist(), strict=True)):
            if tokens:
                found[f"log_prob_diff/lag_{lag}/mean"] = total / tokens
                found[f"log_prob_diff/lag_{lag}/max"] = largest
        self._sums.zero_()
        self._largest.zero_()
        return found
