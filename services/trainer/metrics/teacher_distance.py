"""The distance of the policy from the teacher it is distilled from, on its own samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TeacherDistance:
    """Adds up over the micro-batches of a rollout step; `read` is collective."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> None:
        """All [B, S]; tokens whose mask is 0 do not count."""
        gaps = torch.where(mask > 0, log_probs - teacher_log_probs, 0.0)
        self._sums += torch.stack((gaps.double().sum(), (mask > 0).double().sum()))

    def read(self) -> dict[str, float]:
        """The mean of log π − log π_teacher, an estimate of the reverse KL, over all ranks since the last read."""
        dist.all_reduce(self._sums)
        total, tokens = self._sums.tolist()
        self._sums.zero_()
        return {"opd/kl": total / max(tokens, 1.0)}
