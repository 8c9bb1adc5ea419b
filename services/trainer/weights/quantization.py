"""Weights in FP8 or INT4 with a factor for each block, as engines take them that serve such a checkpoint.

FP8: a block's factor is its largest magnitude / 448, the largest float8_e4m3fn, so that the largest becomes 448;
quantized × factor is the weight again. Blocks at the edges are smaller. DeepSeek-V3, arXiv:2412.19437, section 3.3.

INT4: a block is a group of a row. See `packed_int4`. MXFP4 is read only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from headrace.errors import ConfigError, InvalidArgument
from headrace.models import packed_int4
from headrace.models.folders import SCALE, QuantizedForm
from headrace.publication import TensorSpec

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_FACTOR = torch.finfo(torch.float32).tiny  # below it quotients are no longer exact, and may be infinite
_FACTOR_BYTES = 4


def quantized_specs(form: QuantizedForm, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the specs of the tensors that `quantized` yields. Raises InvalidArgument for one that cannot be sent."""
    found: list[TensorSpec] = []
    for spec in specs:
        if spec.name not in form.weights:
            found.append(spec)
            continue
        if not can_be_quantized(form, spec.shape):
            raise InvalidArgument(
                f"{spec.name} has the shape {list(spec.shape)}: engines take {form} of two dimensions, with a multiple "
                f"of {form.block[1]} columns. Leave it in bfloat16 in hf_checkpoint"
            )
        grid = [-(-size // side) for size, side in zip(spec.shape, form.block, strict=True)]
        if form.bits == _BITS:
            found.append(TensorSpec(spec.name + packed_int4.PACKED, (spec.shape[0], spec.shape[1] // _IN_ONE), "int32"))
            found.append(TensorSpec(spec.name + packed_int4.SCALE, grid, "bfloat16"))
            found.append(TensorSpec(spec.name + packed_int4.SHAPE, (2,), "int32"))
            continue
        found.append(TensorSpec(spec.name, spec.shape, "float8_e4m3fn"))
        found.append(TensorSpec(spec.name + SCALE, grid, "float32"))
    return found


def can_be_quantized(form: QuantizedForm, shape: Sequence[int]) -> bool:
    """SGLang concludes the block from the columns of a weight and of its factors, and views both in one buffer."""
    if len(shape) != 2 or shape[1] % form.block[1]:
        return False
    if form.bits == _BITS:
        return shape[1] % _IN_ONE == 0 and math.prod(shape) // form.block[1] % 2 == 0
    return math.prod(shape) % _FACTOR_BYTES == 0


def quantized(form: QuantizedForm, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the form's weights quantized, each with its factors behind it, and the others as they are.

    Raises InvalidArgument for a weight that is not finite, after the last tensor was taken: other ranks gather them.
    """
    for name, tensor in tensors:
        if name not in form.weights:
            yield name, tensor
            continue
        is_int4 = form.bits == _BITS
        weight, factors = packed(tensor.detach(), form.block[1]) if is_int4 else quantize(tensor.detach(), form.block)
        if not bool(torch.isfinite(factors).all()):
            for _ in tensors:
                pass
            raise InvalidArgument(
                f"{name} has values that are not finite, and {form} knows none: the training diverged"
            )
        if is_int4:
            yield name + packed_int4.PACKED, weight
            yield name + packed_int4.SCALE, factors
            yield name + packed_int4.SHAPE, torch.tensor(tensor.shape, dtype=torch.int32, device=tensor.device)
        else:
            yield name, weight
            yield name + SCALE, factors


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns float8_e4m3fn [out, in] and float32 [blocks of out, blocks of in].

    A block of zeros has the factor 1. One that has a value that is not finite has a factor that is not, either.
    """
    rows, columns = weight.shape
    high, wide = block
    padded = pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = blocks.abs().amax(dim=(1, 3))
    factors = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp(min=_SMALLEST_FACTOR))
    values = (blocks / factors[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), factors


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
_LOWEST, _HIGHEST = -(2 ** (_BITS - 1)), 2 ** (_BITS - 1) - 1


def packed(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns int32 [out, in / 8] and bfloat16 [out, in / group], of which `unpacked_int4` makes the weight again.

    A group that was read from such a form, and reaches -8 or ±7 there, gets the factor that it had, and so the same
    bits. Any other has its largest magnitude / 7.5, as compressed-tensors gives it. A group of zeros has the factor 1.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    largest = groups.abs().amax(dim=-1)
    factors = _factors(largest / ((_HIGHEST - _LOWEST) / 2), largest)
    is_open = torch.ones_like(largest, dtype=torch.bool)
    for levels in (-_LOWEST, _HIGHEST):
        nearest = _factors(largest / levels, largest)
        for step in (0, -1, 1):  # bfloat16 weights are rounded, and the quotient may be a neighbour of the factor
            candidate = (nearest.view(torch.int16) + step).view(torch.bfloat16)
            back = (_levels(groups, candidate) * candidate.float()[..., None]).to(weight.dtype).float()
            fits = is_open & (back == groups).all(dim=-1)
            factors = torch.where(fits, candidate, factors)
            is_open &= ~fits
    values = _levels(groups, factors).nan_to_num().int().view(rows, columns // _IN_ONE, _IN_ONE) - _LOWEST
    places = torch.arange(0, 32, _BITS, dtype=torch.int32, device=weight.device)
    return (values << places).sum(dim=-1, dtype=torch.int64).to(torch.int32), factors


def _factors(quotients: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1.0, quotients.clamp(min=_SMALLEST_FACTOR)).bfloat16()


def _levels(groups: Tensor, factors: Tensor) -> Tensor:
    return (groups / factors.float()[..., None]).round().clamp(_LOWEST, _HIGHEST)


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


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpacked_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 […, in, out] from uint8 [… , out, in / 32, 16] and one exponent for 32 values [… , out, in / 32].

    The lower four bits are the first of two values. OCP Microscaling Formats, version 1.0, sections 5.3.3 and 5.4.1.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
        raise ConfigError(
            f"MXFP4 weight of {blocks.dtype} and shape {list(blocks.shape)} has scales of {scales.dtype} and shape "
            f"{list(scales.shape)}: each needs uint8, and a block one scale: download the whole model"
        )
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    values = torch.stack([table[(blocks & 0xF).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2).transpose(-1, -2)
