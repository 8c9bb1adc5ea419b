"""Block FP8 multiplied out."""

from __future__ import annotations

from torch import Tensor

from headrace.errors import ConfigError


def dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [out, in] from FP8 [out, in] and one factor a block; blocks at the edges are smaller."""
    rows, columns = weight.shape
    factors = scale.float().repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    if factors.shape != weight.shape:
        raise ConfigError(
            f"FP8 weight of shape {list(weight.shape)} has scales of shape {list(scale.shape)}, which blocks of "
            f"{block[0]} × {block[1]} do not fit: look at weight_block_size in config.json"
        )
    return weight.float() * factors
