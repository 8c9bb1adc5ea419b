"""Attention over packed rows against one dense softmax whose mask says, token by token, what is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.megatron.layers import SegmentAttention, SegmentedRow, transformer_engine_row
from services.trainer.plan.rows import Rows, RowSegment

HEADS, GROUPS, WIDTH = 4, 2, 8
ROW = (RowSegment(0, 5), RowSegment(5, 8, 0), RowSegment(8, 9, 0), RowSegment(9, 15), RowSegment(15, 19, 3))
SIZE = ROW[-1].end


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=WIDTH, **changes
    )


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """[T, heads, d] each, `seen` [T, T], to [T, heads * d]."""
    key, value = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, SIZE, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :SIZE]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def seen_in(segments: tuple[RowSegment, ...]) -> Tensor:
    seen = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    for segment in segments:
        for position in range(segment.start, segment.end):
            seen[position, segment.start : position + 1] = True
            if segment.prefix is not None:
                prefix = segments[segment.prefix]
                seen[position, prefix.start : prefix.end] = True
    return seen


@pytest.mark.parametrize("value_width", [WIDTH, 5])
def test_a_segment_sees_its_prefix_and_itself(value_width: int) -> None:
    """Values of another width are those of latent attention."""
    torch.manual_seed(0)
    inputs = random(SIZE, HEADS, WIDTH), random(SIZE, GROUPS, WIDTH), random(SIZE, GROUPS, value_width)
    row = SegmentedRow(segments=ROW)
    found = SegmentAttention(config(), 1, softmax_scale=0.3)(*inputs, None, packed_seq_params=row)
    expected = dense(*inputs, seen_in(ROW), 0.3)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_window_counts_the_prefix_and_a_sink_takes_weight_from_what_is_seen(layer: int, softmax_type: str) -> None:
    """Layer 1 has the window; a sink is one more logit, without a value."""
    torch.manual_seed(0)
    before = 3
    changes = {"window_size": (before, 0), "window_attn_skip_freq": [1, 0], "softmax_type": softmax_type}
    attention = SegmentAttention(config(**changes), layer, softmax_scale=0.3)
    inputs = [random(SIZE, HEADS, WIDTH), random(SIZE, GROUPS, WIDTH), random(SIZE, GROUPS, WIDTH)]
    sinks = None
    if softmax_type == "learnable":
        sinks = random(HEADS)
        attention.softmax_offset = torch.nn.Parameter(sinks.detach())
    found = attention(*inputs, None, packed_seq_params=SegmentedRow(segments=ROW))
    seen = seen_in(ROW)
    if layer == 1:
        seen &= seen.flip(1).cumsum(1).flip(1) <= before + 1  # the last that are seen
    query, key, value = inputs
    expected = dense(query, key, value, seen, 0.3, sinks)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    mine = [*inputs, *attention.parameters()]
    theirs = [*inputs, *([] if sinks is None else [sinks])]
    for one, other in zip(
        *(torch.autograd.grad(o, i, upstream) for o, i in ((found, mine), (expected, theirs))), strict=True
    ):
        torch.testing.assert_close(one, other)
    padded = attention(*(each[:5, None] for each in inputs), None)
    torch.testing.assert_close(padded[:, 0], expected[:5])


def test_transformer_engine_gets_the_bounds_of_the_samples() -> None:
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    segments = (RowSegment(0, 4), RowSegment(4, 9))
    packed = transformer_engine_row(Rows(tokens, tokens, segments), segments)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 4, 9]
    assert packed.max_seqlen_q == 5
