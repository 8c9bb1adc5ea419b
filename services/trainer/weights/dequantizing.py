"""Block FP8 and packed INT4, multiplied out."""

from __future__ import annotations

import torch
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


_BITS = 4
_IN_ONE = 32 // _BITS


def unpacked_int4(packed: Tensor, scale: Tensor, shape: tuple[int, ...], group: int) -> Tensor:
    """float32 [out, in] from int32 [out, in / 8] and one factor for each `group` values of a row [out, in / group].

    The lowest four bits are the first value, which is stored plus 8.
    """
    rows, columns = shape
    needs = [rows, -(-columns // _IN_ONE)], [rows, -(-columns // group)]
    if [list(packed.shape), list(scale.shape)] != [*needs]:
        raise ConfigError(
            f"INT4 weight of shape {[rows, columns]} is packed in {list(packed.shape)} with factors of shape "
            f"{list(scale.shape)}; groups of {group} need {needs[0]} and {needs[1]}: look at group_size in config.json"
        )
    places = torch.arange(0, 32, _BITS, dtype=torch.int32)
    values: Tensor = ((packed[..., None] >> places) & (2**_BITS - 1)).flatten(1)[:, :columns] - 2 ** (_BITS - 1)
    return values.float() * scale.float().repeat_interleave(group, dim=1)[:, :columns]
