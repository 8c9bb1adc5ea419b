"""Attention over rows that hold several samples, for layers without Transformer Engine.

Megatron's own attention takes one causal sequence a row and nothing else. This one stands in its place in a layer's
spec and computes each segment of a row on its own, after the prefix that it shares with others, through torch's fused
attention; a padded batch is one call. Works for multi-latent attention as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.errors import ConfigError
from services.trainer.megatron.gpt.spec_parts import with_parts
from services.trainer.plan.rows import Rows, RowSegment, Share


@dataclass
class SegmentedRow(PackedSeqParams):
    """Passes through Megatron as one packed sequence of T tokens whose rotary angles are chosen by `positions`."""

    segments: Sequence[RowSegment] = ()
    share: Share | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, rows: Rows, segments: Sequence[RowSegment]) -> SegmentedRow:
        """The facts that attention needs of `rows`, a single row of these segments."""
        size = rows.tokens.shape[1]
        bounds = torch.tensor([0, size], dtype=torch.int32, device=rows.tokens.device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=size,
            max_seqlen_kv=size,
            segments=segments,
            share=rows.share,
            positions=rows.positions[0],
        )


def transformer_engine_row(rows: Rows, segments: Sequence[RowSegment]) -> PackedSeqParams:
    """The same for Transformer Engine's attention (THD); its segments have no prefixes."""
    ends = [0, *(segment.end for segment in segments)]
    longest = max(segment.size for segment in segments)
    bounds = torch.tensor(ends, dtype=torch.int32, device=rows.tokens.device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


class SegmentAttention(MegatronModule):
    """`core_attention` of a layer's spec. Causal, without dropout."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None:
            raise ConfigError(
                f"layer {layer_number} attends within a window of {config.window_size}: that needs Transformer Engine: "
                "install it"
            )
        if config.softmax_type != "vanilla":
            raise ConfigError(f"softmax_type {config.softmax_type} needs Transformer Engine: install it")
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SegmentedRow | None = None,
    ) -> Tensor:
        """[S, B, heads, d] or, packed, [T, heads, d], to [S, B, heads * d] or [T, heads * d]."""
        if packed_seq_params is not None and packed_seq_params.share is not None:
            key, value = (_gathered(each, packed_seq_params.share) for each in (key, value))
        key, value = (_repeated(each, query.shape[-2]) for each in (key, value))
        if packed_seq_params is None:
            queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            return self._attend(queries, keys, values).permute(2, 0, 1, 3).flatten(2)
        return self._of_segments(query, key, value, packed_seq_params)

    def _of_segments(self, query: Tensor, key: Tensor, value: Tensor, row: SegmentedRow) -> Tensor:
        # Split, not sliced: the gradient of a slice is a tensor as long as the row, for every one of them.
        sizes = [segment.size for segment in row.segments]
        runs = list(_runs(row))
        keys, values = (torch.split(each.transpose(0, 1)[None], sizes, dim=2) for each in (key, value))
        queries = torch.split(query.transpose(0, 1)[None], [end - start for _, start, end in runs], dim=2)
        outputs = []
        for asking, (number, start, end) in zip(queries, runs, strict=True):
            prefix = row.segments[number].prefix
            before = 0 if prefix is None else sizes[prefix]
            key, value = (_up_to(each, prefix, number, end) for each in (keys, values))
            is_whole = not before and not start
            seen = (
                None if is_whole else query.new_ones(end - start, before + end, dtype=torch.bool).tril(before + start)
            )
            outputs.append(self._attend(asking, key, value, seen))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """[B, heads, S, d]; causal where nothing says what is seen."""
        return scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None, scale=self._scale)


def _runs(row: SegmentedRow) -> Iterator[tuple[int, int, int]]:
    """(segment, start, end): the positions of this rank in order, as places in their segments."""
    spans = ((0, row.segments[-1].end),) if row.share is None else row.share.spans
    for first, last in spans:
        for number, segment in enumerate(row.segments):
            start, end = max(first, segment.start), min(last, segment.end)
            if start < end:
                yield number, start - segment.start, end - segment.start


def _up_to(parts: Sequence[Tensor], prefix: int | None, number: int, end: int) -> Tensor:
    """[1, heads, n, d]: a segment's prefix, and of itself the first `end`."""
    own = parts[number] if end == parts[number].shape[2] else parts[number][:, :, :end]
    return own if prefix is None else torch.cat([parts[prefix], own], dim=2)


def _gathered(tensor: Tensor, share: Share) -> Tensor:
    """[T, heads, d] of the whole row; a gradient goes back to the rank whose part it is of, summed over all."""
    parts: Tensor = gather_from_sequence_parallel_region(tensor.contiguous(), group=share.group)
    return parts[share.order]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Key and value heads, as many as queries have."""
    times = heads // tensor.shape[-2]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=-2)


def with_segment_attention(spec: Any) -> Any:
    """The spec of a layer or a block with this attention in every layer."""
    return with_parts(spec, lambda name, part: SegmentAttention if name == "core_attention" else part)
