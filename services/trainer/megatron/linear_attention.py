"""The gated delta net (https://arxiv.org/abs/2412.06464) and the Mamba-2 mixer (https://arxiv.org/abs/2405.21060).

Rows hold several samples. Megatron-core's own take one sequence a row, with kernels for GPUs. These start each segment
of a row at the state behind its prefix, or at nothing, and so does the short convolution before it: no segment sees
another. They are plain torch, in float32 at least. Ranks that hold a row together compute the states of the whole row,
and give their own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, repeat
from typing import Any, ClassVar, TypeAlias

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus
from torch.utils.checkpoint import checkpoint

from headrace.models.architecture import LinearAttention, Mamba
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
    @lru_cache(maxsize=8)
    def of(cls, segments: tuple[RowSegment, ...], device: torch.device) -> Scan:
        """Of segments in order and without gaps; the same for every layer of a pass."""
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


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, scan: Scan) -> Tensor:
    """[T, heads, d] of queries, keys and values, [T, heads] of log decays and betas, to [T, heads, d of a value].

    S_t = exp(decay_t) S_(t-1) + k_t u_t', u_t = beta_t (v_t - exp(decay_t) S_(t-1)' k_t), o_t = S_t' q_t. In a chunk
    the u are the solution of a triangular system, and the chunks follow each other.
    """
    query, key, value = (_chunked(each, scan) for each in (query, key, value))  # [N, heads, _CHUNK, d]
    decay, beta = (_chunked(each[..., None], scan) for each in (decay, beta))  # [N, heads, _CHUNK, 1]
    total, between = _decays(decay)
    system = (beta * key) @ key.mT * between
    known = torch.cat([beta * value, beta * total.exp() * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, of_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    return _outputs(own, of_state, query, key, query @ key.mT * between, total, scan)


def state_space(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, scan: Scan) -> Tensor:
    """[T, groups, d] of queries and keys, [T, heads, d] of values, [T, heads] of log decays, to [T, heads, d].

    S_t = exp(decay_t) S_(t-1) + k_t v_t', o_t = S_t' q_t.
    """
    query, key, value = (_chunked(each, scan) for each in (query, key, value))
    total, between = _decays(_chunked(decay[..., None], scan))
    times = value.shape[1] // key.shape[1]
    products, query, key = (each.repeat_interleave(times, dim=1) for each in (query @ key.mT, query, key))
    return _outputs(value, None, query, key, products * between, total, scan)


def _decays(decay: Tensor) -> tuple[Tensor, Tensor]:
    """[N, heads, _CHUNK, 1], summed from a chunk's first token; and [N, heads, _CHUNK, _CHUNK], factors."""
    total = decay.cumsum(2)
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=total.device).triu(1)
    return total, (total - total.mT).masked_fill(future, float("-inf")).exp()


def _outputs(
    own: Tensor, of_state: Tensor | None, query: Tensor, key: Tensor, seen: Tensor, total: Tensor, scan: Scan
) -> Tensor:
    """[T, heads, d]: each chunk writes its own values, less what `of_state` reads of the state before it."""
    last = total[:, :, -1:]
    parts = (own, seen, query * total.exp(), key * (last - total).exp(), last.exp())
    read = repeat(None) if of_state is None else of_state.unbind()
    steps = zip(read, *(part.unbind() for part in parts), strict=False)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    nothing = own.new_zeros(own.shape[1], key.shape[-1], own.shape[-1])
    for num_chunks, prefix in scan.runs:
        state = nothing if prefix is None else states[prefix]
        for _ in range(num_chunks):
            reading, update, within, asking, written, left = next(steps)
            if reading is not None:
                update = update - reading @ state
            outputs.append(asking @ state + within @ update)
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


class GroupNorm(nn.Module):
    """Tokens times SiLU of a gate, then a norm of each group of heads. Each tensor rank has other groups."""

    def __init__(self, size: int, groups: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._groups, self._epsilon = groups, epsilon

    def forward(self, tokens: Tensor, gate: Tensor) -> Tensor:
        """[T, heads, d] to [T, heads * d], in the gate's type."""
        gated = (tokens * silu(gate.to(tokens.dtype))).flatten(1).unflatten(1, (self._groups, -1))
        normed = nn.functional.rms_norm(gated, gated.shape[2:], eps=self._epsilon).flatten(1)
        return (normed * self.weight.to(tokens.dtype)).to(gate.dtype)


class _Recurrent(MegatronModule):
    """`self_attention` of a layer's spec, with the linear layers of attention around a convolution and a recurrence."""

    has_bias: ClassVar[bool]
    """Of the convolution."""
    out_norm: nn.Module

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        parts: Sequence[int],
        gate: int,
        channels: int,
        width: int,
        group: Any,
    ) -> None:
        """`parts` are this rank's rows of the input projection, and `gate` says which of them is the norm's gate."""
        super().__init__(config=config)
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self._parts, self._gate = list(parts), gate
        ranks = group.size()
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": group}
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
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=self.has_bias)
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(parts[-1])) for _ in range(2))
        self.linear_proj = build_module(
            submodules.linear_proj,
            parts[gate] * ranks,
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
        parts = list(projected.transpose(0, 1).flatten(0, 1).split(self._parts, dim=-1))
        gate = parts.pop(self._gate)
        share = packed_seq_params.share if isinstance(packed_seq_params, SegmentedRow) else None
        if share is not None:
            parts = [whole_row(part, share) for part in parts]
        mix = partial(checkpoint, self._mixed, use_reentrant=False) if self._recomputes else self._mixed
        mixed = mix(*parts, Scan.of(_segments(packed_seq_params, batch, size), gate.device))
        if share is not None:
            mixed = torch.cat([mixed[start:end] for start, end in share.spans])
        normed = self.out_norm(mixed, gate.unflatten(-1, mixed.shape[1:])).flatten(1)
        output: tuple[Tensor, Tensor | None]
        output = self.linear_proj(normed.unflatten(0, (batch, size)).transpose(0, 1).contiguous())
        return output

    def _mixed(self, *parts: Any) -> Tensor:
        """Those of whole rows, and their scan, to [T, heads, d]."""
        raise NotImplementedError

    def _convolved(self, tokens: Tensor, scan: Scan) -> Tensor:
        """[T, channels]: each token with those before it in its segment and its prefix. In float32 at least."""
        exact = torch.promote_types(tokens.dtype, torch.float32)
        padded = pad(tokens.to(exact), (0, 0, 1, 0))
        place = torch.arange(1, len(padded), device=tokens.device)
        found = torch.zeros_like(padded[1:])
        for weight in self.conv1d.weight[:, 0].to(exact).flip(-1).unbind(-1):
            found = found + padded[place] * weight
            place = scan.before[place]
        if self.conv1d.bias is not None:
            found = found + self.conv1d.bias.to(exact)
        return silu(found).to(tokens.dtype).to(exact)


class GatedDeltaNet(_Recurrent):
    """Of Qwen3-Next and Qwen3.5."""

    has_bias = False

    def __init__(self, config: TransformerConfig, submodules: Any, linear: LinearAttention, pg_collection: Any) -> None:
        ranks = pg_collection.tp.size()
        heads = linear.num_value_heads // ranks
        key, value = linear.num_key_heads // ranks * linear.key_head_dim, heads * linear.value_head_dim
        channels, width = 2 * key + value, linear.conv_kernel_dim
        super().__init__(config, submodules, (channels, value, heads, heads), 1, channels, width, pg_collection.tp)
        self._linear, self._qkv = linear, (key, key, value)
        self.out_norm = GatedNorm(linear.value_head_dim, config.layernorm_epsilon, pg_collection.tp)

    def _mixed(self, qkv: Tensor, beta: Tensor, decay: Tensor, scan: Scan) -> Tensor:
        exact = torch.promote_types(qkv.dtype, torch.float32)
        linear = self._linear
        parts = self._convolved(qkv, scan).split(self._qkv, dim=-1)
        query, key = (_unit(part.unflatten(-1, (-1, linear.key_head_dim))) for part in parts[:2])
        value = parts[2].unflatten(-1, (-1, linear.value_head_dim))
        times = linear.num_value_heads // linear.num_key_heads
        query, key = (each.repeat_interleave(times, dim=1) for each in (query * linear.key_head_dim**-0.5, key))
        decay = -self.A_log.to(exact).exp() * softplus(decay.to(exact) + self.dt_bias.to(exact))
        return gated_delta_rule(query, key, value, decay, beta.to(exact).sigmoid(), scan)


class MambaMixer(_Recurrent):
    """Of Nemotron-H."""

    has_bias = True

    def __init__(self, config: TransformerConfig, submodules: Any, mamba: Mamba, pg_collection: Any) -> None:
        ranks = pg_collection.tp.size()
        gate, *convolved, heads = (size // ranks for size in mamba.sections)
        parts, width = (gate, sum(convolved), heads), mamba.conv_kernel_dim
        super().__init__(config, submodules, parts, 0, sum(convolved), width, pg_collection.tp)
        self._convolved_parts, self._groups = convolved, mamba.num_groups // ranks
        self.D = nn.Parameter(torch.ones(heads))
        self.out_norm = GroupNorm(gate, self._groups, config.layernorm_epsilon)

    def _mixed(self, tokens: Tensor, steps: Tensor, scan: Scan) -> Tensor:
        exact = torch.promote_types(tokens.dtype, torch.float32)
        value, key, query = self._convolved(tokens, scan).split(self._convolved_parts, dim=-1)
        value = value.unflatten(-1, (steps.shape[-1], -1))
        key, query = (each.unflatten(-1, (self._groups, -1)) for each in (key, query))
        steps = softplus(steps.to(exact) + self.dt_bias.to(exact))
        decay = -self.A_log.to(exact).exp() * steps
        skipped: Tensor = self.D.to(exact)[:, None] * value
        return state_space(query, key, value * steps[..., None], decay, scan) + skipped


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
    """Makes a layer's attention: linear attention, or the wrapped kind, as the layer's number says."""

    linear: ClassVar[LinearAttention | Mamba]
    other: ClassVar[Any]

    def __new__(cls, config: TransformerConfig, submodules: Any, layer_number: int, **named: Any) -> Any:
        if layer_number - 1 in cls.linear.layers:
            kind: Any = MambaMixer if isinstance(cls.linear, Mamba) else GatedDeltaNet
            return kind(config, submodules, cls.linear, named["pg_collection"])
        return cls.other(config, submodules, layer_number, **named)


def with_linear_attention(spec: Any, linear: LinearAttention | Mamba) -> Any:
    """The spec of a layer or a block with linear attention in these layers."""

    def mixed(name: str, part: Any) -> Any:
        if name != "self_attention" or part is IdentityOp:
            return part
        kind = type("MixedAttention", (_MixedAttention,), {"linear": linear, "other": part.module})
        return ModuleSpec(kind, part.params, part.submodules)

    return with_parts(spec, mixed)
