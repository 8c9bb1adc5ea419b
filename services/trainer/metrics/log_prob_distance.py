"""The distance of trainer and engines in log-probs, by the staleness of a sample's oldest token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_STALENESS = 8
"""Everything older is counted as so old."""


class LogProbDistance:
    """Adds up over the micro-batches of a rollout step; `read` is collective."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, LARGEST_STALENESS + 1, dtype=torch.float64, device=device)
        self._largest = torch.zeros(LARGEST_STALENESS + 1, dtype=torch.float64, device=device)

    def add(self, before: Tensor, rollout: Tensor, mask: Tensor, staleness: Tensor) -> None:
        """Adds log-probs of trainer and engine [B, S] where `mask` [B, S] is 1, with each sample's staleness [B, 1]."""
        distance = ((before - rollout).abs() * mask).double()
        steps_behind = staleness[:, 0].long().clamp(0, LARGEST_STALENESS)
        self._sums[0].index_add_(0, steps_behind, distance.sum(1))
        self._sums[1].index_add_(0, steps_behind, mask.sum(1).double())
        self._largest.scatter_reduce_(0, steps_behind, distance.amax(1), "amax")

    def read(self) -> dict[str, float]:
        """Returns mean and maximum for each staleness that occurred, over all ranks, since the last read."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found = {}
        rows = zip(*self._sums.tolist(), self._largest.tolist(), strict=True)
        for steps_behind, (total, tokens, largest) in enumerate(rows):
            if tokens:
                found[f"log_prob_diff/lag_{steps_behind}/mean"] = total / tokens
                found[f"log_prob_diff/lag_{steps_behind}/max"] = largest
        self._sums.zero_()
        self._largest.zero_()
        return found
