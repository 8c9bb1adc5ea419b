"""Lays the tensors of a bucket end to end, in memory that is made once and kept for all publications."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.trainer.weights.engine_layout import flat_bytes

_AT_ONCE = 2  # one on its way, one that is laid


class FlatBuckets:
    """Two buffers that take turns: what `pack` returned stays as it is until `pack` is called a second time."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]
        self._turn = 0

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns uint8, shape [bytes]; a view where there is one tensor."""
        parts = [flat_bytes(tensor) for tensor in tensors]
        if len(parts) == 1:
            return parts[0]
        self._turn = (self._turn + 1) % _AT_ONCE
        num_bytes = sum(part.numel() for part in parts)
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=parts[0].device)
        return torch.cat(parts, out=self._buffers[self._turn][:num_bytes])
