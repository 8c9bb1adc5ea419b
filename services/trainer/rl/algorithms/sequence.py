"""Sums and means over each response of a micro-batch: one response a row."""

from __future__ import annotations

from torch import Tensor, where


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of a row's masked-in values, [B, 1] from [B, R]; what is not finite elsewhere does not count."""
    return where(mask > 0, values, 0.0).sum(dim=1, keepdim=True)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Their mean, [B, 1]; 0 for a response that is masked in whole."""
    return sequence_sum(values, mask) / (mask > 0).sum(dim=1, keepdim=True).clamp(min=1)
