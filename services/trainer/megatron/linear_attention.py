"""The gated delta net of a layer (https://arxiv.org/abs/2412.06464), over rows that hold several samples.

Megatron-core's own takes one sequence a row, with kernels for GPUs. This one starts each segment of a row at the state
behind its prefix, or at nothing, and so does the short convolution before it: no segment sees another. It is plain
torch, in float32 at least. Ranks that hold a row together compute the states of the whole row, and give their own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus
from torch.utils.checkpoint import checkpoint

from headrace.models.architecture import LinearAttention
from services.trainer.megatron.layers import SegmentedRow, whole_row, with_parts
from services.trainer.plan.rows import RowSegment

_CHUNK = 64
_EPSILON = 1e-6
Row: TypeAlias = PackedSeqParams | None
"""None: padded, every row is one causal sequence."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The order in which a row's T tokens are seen. Places count from 1; 0 is a token of zeros."""

    before: Tensor
    """int64 [T + 1]: the place of the token before each"""
    chunks: Tensor
    """int64 [N, _CHUNK]: the tokens, each segment in chunks of its own"""
    places: Tensor
    """int64 [T]: where each token is in the flattened chunks"""
    runs: Sequence[tuple[int, int | None]]
    """Of each segment: its number of chunks, and the segment that it continues"""

    @classmethod
    def of(cls, segments: Sequence[RowSegment], device: torch.device) -> Scan:
        """Of segments in order and without gaps."""
        before, chunks = [torch.zeros(1, dtype=torch.int64)], []
        for segment in segments:
            places = torch.arange(segment.start + 1, segment.end + 1)
            first = 0 if segment.prefix is None else segments[segment.prefix].end
            before += [torch.tensor([first]), places[:-1]]
            chunks.append(pad(places, (0, -len(places) % _CHUNK)).view(-1, _CHUNK))
        whole = torch.cat(chunks)
        places = whole.flatten().nonzero()[:, 0]
        runs = [(len(each), segment.prefix) for each, segment in zip(chunks, segments, strict=True)]
        return cls(torch.cat(before).to(device), whole.to(device), places.to(device), runs)


@lru_cache(maxsize=8)
def scan_of(segments: tuple[RowSegment, ...], device: torch.device) -> Scan:
    """The same for every layer of a pass."""
    return Scan.of(segments, device)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, scan: Scan) -> Tensor:
    """[T, heads, d] of queries, keys and values, [T, heads] of log decays and betas, to [T, heads, d of a value].

    S_t = exp(decay_t) S_(t-1) + k_t u_t', u_t = beta_t (v_t - exp(decay_t) S_(t-1)' k_t), o_t = S_t' q_t. In a chunk
    the u are the solution of a triangular system, and the chunks follow each other.
    """
    query, key, value = (_chunked(each, scan) for each in (query, key, value))  # [N, heads, _CHUNK, d]
    decay, beta = (_chunked(each[..., None], scan) for each in (decay, beta))  # [N, heads, _CHUNK, 1]
    total = decay.cumsum(2)
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=total.device).triu(1)
    between = (total - total.mT).masked_fill(future, float("-inf")).exp()
    system = (beta * key) @ key.mT * between
    known = torch.cat([beta * value, beta * total.exp() * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    parts = (
        *solved.split([value.shape[-1], key.shape[-1]], dim=-1),
        query @ key.mT * between,
        query * total.exp(),
        key * (total[:, :, -1:] - total).exp(),
        total[:, :, -1:].exp(),
    )
    steps = zip(*(part.unbind() for part in parts), strict=True)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    nothing = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
    for num_chunks, prefix in scan.runs:
        state = nothing if prefix is None else states[prefix]
        for _ in range(num_chunks):
            own, of_state, seen, asking, written, left = next(steps)
            update = own - of_state @ state
            outputs.append(asking @ state + seen @ update)
            state = left * state + written.mT @ update
        states.append(state)
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[scan.places]


def _chunked(tokens: Tensor, scan: Scan) -> Tensor:
    """[T, heads, d] to [N, heads, _CHUNK, d], zeros where a segment has no token."""
    return pad(tokens, (0, 0, 0, 0, 1, 0))[scan.chunks].transpose(1, 2)


class GatedNorm(nn.Module):
    """A norm of each head, not zero-centred, times SiLU of a gate. Each tensor rank has other heads."""

    def __init__(self, size: int, epsilon: float, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon, self._group = epsilon, group

    def forward(self, tokens: Tensor, gate: Tensor) -> Tensor:
        """[T, heads, d], in the gate's type."""
        weight = copy_to_tensor_model_parallel_region(self.weight, self._group)
        normed = nn.functional.rms_norm(tokens, weight.shape, weight.to(tokens.dtype), self._epsilon)
        return (normed * silu(gate.to(tokens.dtype))).to(gate.dtype)


class GatedDeltaNet(MegatronModule):
    """`self_attention` of a layer's spec, with the linear layers of attention."""

    def __init__(self, config: TransformerConfig, submodules: Any, linear: LinearAttention, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._linear = linear
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        ranks = pg_collection.tp.size()
        heads = linear.num_value_heads // ranks
        key, value = linear.num_key_heads // ranks * linear.key_head_dim, heads * linear.value_head_dim
        self._qkv = (key, key, value)
        self._parts = (2 * key + value, value, heads, heads)
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            sum(self._parts) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **shared,
        )
        channels, width = self._parts[0], linear.conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.dt_bias, self.A_log = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.out_norm = GatedNorm(linear.value_head_dim, config.layernorm_epsilon, pg_collection.tp)
        self.linear_proj = build_module(
            submodules.linear_proj,
            value * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Row = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H], or this tensor rank's part of S with sequence parallelism."""
        projected, _ = self.linear_qkv(hidden_states)
        size, batch, _ = projected.shape
        qkv, gate, beta, decay = projected.transpose(0, 1).flatten(0, 1).split(self._parts, dim=-1)
        share = packed_seq_params.share if isinstance(packed_seq_params, SegmentedRow) else None
        if share is not None:
            qkv, beta, decay = (whole_row(each, share) for each in (qkv, beta, decay))
        mix = partial(checkpoint, self._mixed, use_reentrant=False) if self._recomputes else self._mixed
        mixed = mix(qkv, beta, decay, scan_of(_segments(packed_seq_params, batch, size), qkv.device))
        if share is not None:
            mixed = torch.cat([mixed[start:end] for start, end in share.spans])
        normed = self.out_norm(mixed, gate.unflatten(-1, mixed.shape[1:])).flatten(1)
        output: tuple[Tensor, Tensor | None]
        output = self.linear_proj(normed.unflatten(0, (batch, size)).transpose(0, 1).contiguous())
        return output

    def _mixed(self, qkv: Tensor, beta: Tensor, decay: Tensor, scan: Scan) -> Tensor:
        """[T, value heads, d]."""
        exact = torch.promote_types(qkv.dtype, torch.float32)
        linear = self._linear
        parts = self._convolved(qkv.to(exact), scan).to(qkv.dtype).to(exact).split(self._qkv, dim=-1)
        query, key = (_unit(part.unflatten(-1, (-1, linear.key_head_dim))) for part in parts[:2])
        value = parts[2].unflatten(-1, (-1, linear.value_head_dim))
        times = linear.num_value_heads // linear.num_key_heads
        query, key = (each.repeat_interleave(times, dim=1) for each in (query * linear.key_head_dim**-0.5, key))
        decay = -self.A_log.to(exact).exp() * softplus(decay.to(exact) + self.dt_bias.to(exact))
        return gated_delta_rule(query, key, value, decay, beta.to(exact).sigmoid(), scan)

    def _convolved(self, tokens: Tensor, scan: Scan) -> Tensor:
        """[T, channels]: each token with those before it in its segment and its prefix."""
        padded = pad(tokens, (0, 0, 1, 0))
        place = torch.arange(1, len(padded), device=tokens.device)
        found = torch.zeros_like(tokens)
        for weight in self.conv1d.weight[:, 0].to(tokens.dtype).flip(-1).unbind(-1):
            found = found + padded[place] * weight
            place = scan.before[place]
        return silu(found)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPSILON)


def _segments(row: Row, batch: int, size: int) -> tuple[RowSegment, ...]:
    """Those of a packed row; else every row is one."""
    if row is None:
        return tuple(RowSegment(n * size, (n + 1) * size) for n in range(batch))
    if isinstance(row, SegmentedRow):
        return tuple(row.segments)
    return tuple(RowSegment(start, end) for start, end in pairwise(row.cu_seqlens_q.tolist()))


class _MixedAttention:
    """Makes a layer's attention: a gated delta net, or the wrapped kind, as the layer's number says."""

    linear: ClassVar[LinearAttention]
    other: ClassVar[Any]

    def __new__(cls, config: TransformerConfig, submodules: Any, layer_number: int, **named: Any) -> Any:
        if layer_number - 1 in cls.linear.layers:
            return GatedDeltaNet(config, submodules, cls.linear, named["pg_collection"])
        return cls.other(config, submodules, layer_number, **named)


def with_linear_attention(spec: Any, linear: LinearAttention) -> Any:
    """The spec of a layer or a block with gated delta nets in these layers."""

    def mixed(name: str, part: Any) -> Any:
        if name != "self_attention":
            return part
        kind = type("MixedAttention", (_MixedAttention,), {"linear": linear, "other": part.module})
        return ModuleSpec(kind, part.params, part.submodules)

    return with_parts(spec, mixed)
