"""The modules that this rank's layers are made of, where Megatron-core's own do not fit.

Attention over rows that hold several samples, for layers without Transformer Engine: Megatron's own attention takes
one causal sequence a row and nothing else. This one stands in its place in a layer's spec and computes each segment of
a row on its own, after the prefix that it shares with others, through torch's fused attention; a padded batch is one
call. It works for multi-latent attention as well.

Torch's norms in layers without Transformer Engine: Megatron-core's own wrapper refuses sequence parallelism, because
nothing adds up the gradients of a norm's weight over the ranks that each saw a stretch of the sequence. It is enough
to mark the weight: finalize_model_grads does it then.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from headrace.models.architecture import Architecture, LatentAttention
from services.trainer.megatron.configs import mark_sequence_parallel
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.rows import Rows, RowSegment, Share


def with_parts(spec: Any, chosen: Callable[[str, Any], Any]) -> Any:
    """The spec with `chosen(name of the field, part)` in the place of every part."""
    if isinstance(spec, list | tuple):
        return type(spec)(with_parts(each, chosen) for each in spec)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    parts = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    return dataclasses.replace(spec, **{name: with_parts(chosen(name, part), chosen) for name, part in parts.items()})


class ZeroCentredNorm(torch.nn.RMSNorm):
    """Multiplies by 1 + weight, in float32 at least."""

    def forward(self, tokens: Tensor) -> Tensor:
        exact = torch.promote_types(tokens.dtype, torch.float32)
        weight = 1.0 + self.weight.to(exact)
        return rms_norm(tokens.to(exact), self.normalized_shape, weight, self.eps).to(tokens.dtype)


class MarkedNorm:
    """Makes the norm of a spec: RMSNorm, or LayerNorm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = (ZeroCentredNorm if config.layernorm_zero_centered_gamma else kind)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            mark_sequence_parallel(parameter, config.sequence_parallel)
        return norm


class NormOverHeads(torch.nn.Module):
    """RMSNorm over all heads, of which this rank has some: the others' squares count too.

    Every rank has the whole weight and uses its part. Megatron sums the gradients of queries' and keys' norms over the
    tensor ranks.
    """

    num_heads: ClassVar[str]
    """The field of the config."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        heads = getattr(config, self.num_heads)
        self._eps, self._ranks = eps, config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(heads * hidden_size))

    def forward(self, heads: Tensor) -> Tensor:
        """[S, B, heads of this rank, d], in the type of these; computed in float32 at least."""
        tokens = heads.to(torch.promote_types(heads.dtype, torch.float32))
        squares = tokens.square().sum((-2, -1), keepdim=True)
        # Summed over the ranks, and so is the gradient: every rank's heads depend on the sum.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        weight = self.weight.to(tokens.dtype).view(self._ranks, *heads.shape[-2:])[get_tensor_model_parallel_rank()]
        normed: Tensor = tokens * (squares / self.weight.numel() + self._eps).rsqrt() * weight
        return normed.to(heads.dtype)


class QueryNorm(NormOverHeads):
    num_heads = "num_attention_heads"


class KeyNorm(NormOverHeads):
    num_heads = "num_query_groups"


def without_pre_norms(layer: ModuleSpec, *, with_te: bool) -> None:
    """Leaves out a layer's norms before attention and MLP; Transformer Engine's are fused into the projections."""
    submodules, mlp = layer.submodules, layer.submodules.mlp
    submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
    if with_te:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as plain

        submodules.self_attention.submodules.linear_qkv = plain
        (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).linear_fc1 = plain


Output = tuple[Tensor, Tensor | None]


class _PostNorm:
    """A base before a Megatron module: its output goes through `post_norm`, and no bias comes behind that."""

    norm: ClassVar[Any]
    config: Any
    """Every Megatron module has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.post_norm = type(self).norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        output, bias = super().forward(*args, **kwargs)  # type: ignore[misc]  # the Megatron module has it
        return self.post_norm(output), bias


class NormedSelfAttention(_PostNorm, SelfAttention):
    """Self-attention, then the norm."""


class NormedMLP(_PostNorm, MLP):
    """MLP, then the norm."""


class _LocalRotary:
    """A base before self-attention: layers within windows turn by plain frequencies of their own."""

    rotary_base: ClassVar[float]
    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, number = self.config, self.layer_number  # type: ignore[attr-defined]  # of the Megatron module
        self.rotary_pos_emb = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
            self.config = copy.copy(config)
            vars(self.config).pop("yarn_rotary_scaling_factor", None)  # Megatron asks for it to scale the angles
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=self.rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
            )

    def forward(
        self, hidden: Tensor, *args: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **named: Any
    ) -> Output:
        if (rotary := self.rotary_pos_emb) is not None:
            length = rotary.get_rotary_seq_len(None, None, hidden, self.config, packed_seq_params)
            rotary_pos_emb = rotary(length, packed_seq=packed_seq_params is not None)
        found: Output = super().forward(  # type: ignore[misc]  # the Megatron module has it
            hidden, *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **named
        )
        return found


def with_local_rotary(layer: ModuleSpec, rotary_base: float) -> None:
    """Gives the layer's attention these angles where it attends within a window."""
    attention = layer.submodules.self_attention
    local = type("LocalSelfAttention", (_LocalRotary, attention.module), {"rotary_base": rotary_base})
    layer.submodules.self_attention = ModuleSpec(local, attention.params, attention.submodules)


def with_post_norms(layer: ModuleSpec, norm: type) -> None:
    """Exchanges the layer's attention and MLP for normed ones."""
    submodules = layer.submodules
    attention, mlp = submodules.self_attention, submodules.mlp
    normed = type("NormedSelfAttention", (NormedSelfAttention,), {"norm": norm})
    submodules.self_attention = ModuleSpec(normed, attention.params, attention.submodules)
    normed_mlp: Any = type("NormedMLP", (NormedMLP,), {"norm": norm})
    # Megatron-core 0.19 builds an MLP through a classmethod, 0.16 from a spec.
    if isinstance(mlp, partial):
        submodules.mlp = partial(normed_mlp.as_mlp_submodule, **mlp.keywords)
    else:
        submodules.mlp = ModuleSpec(normed_mlp, mlp.params, mlp.submodules)


class BiasedExpert(RowParallelLinear):
    """The last layer of an expert with biases, to whose output Megatron's MLP adds in place: not to a view."""

    def forward(self, input_: Tensor) -> Output:
        """A copy, and the bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


_EPSILON = 1e-6


class LatentNorm(MarkedNorm):
    """The published models' norms of the latents have an epsilon of their own, whatever rms_norm_eps says."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = _EPSILON, **_: object) -> Any:
        return MarkedNorm(config, hidden_size, _EPSILON)


class PlainQueries(MLASelfAttention):
    """Queries without a latent have no norm, which Megatron-core 0.19 would fuse into their projection."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return super()._resolve_qk_norm_config(submodules) | {"linear_q_proj": submodules.linear_q_proj}


def with_latent_attention(layer: ModuleSpec, latent: LatentAttention, *, with_te: bool) -> None:
    """Gives the layer's attention these parts; Transformer Engine's norms are fused into the projections."""
    attention = layer.submodules.self_attention
    if latent.q_lora_rank is None:
        layer.submodules.self_attention = ModuleSpec(PlainQueries, attention.params, attention.submodules)
    if not with_te:
        attention.submodules.kv_layernorm = LatentNorm
        attention.submodules.q_layernorm = IdentityOp if latent.q_lora_rank is None else LatentNorm


def with_one_part(layer: ModuleSpec, *, is_mlp: bool) -> ModuleSpec:
    """The layer's spec without its attention, or without its MLP: norm, part and residual."""
    left_out = (
        ("input_layernorm", "self_attention", "self_attn_bda") if is_mlp else ("pre_mlp_layernorm", "mlp", "mlp_bda")
    )
    nothing = dict(zip(left_out, (IdentityOp, IdentityOp, IdentityFuncOp), strict=True))
    return ModuleSpec(layer.module, layer.params, dataclasses.replace(layer.submodules, **nothing))


def has_transformer_engine(layout: Layout) -> bool:
    """Transformer Engine's layers where it is installed, Megatron's own elsewhere."""
    return layout.device.type == "cuda" and find_spec("transformer_engine") is not None


def layer_specs(
    architecture: Architecture, config: TransformerConfig, layout: Layout, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or with experts as the architecture says."""
    with_te = has_transformer_engine(layout)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_te, normalization=architecture.normalization, vp_stage=vp_stage
    )
    if not with_te:
        block = with_parts(block, lambda _, part: MarkedNorm if part is WrappedTorchNorm else part)
        if architecture.add_bias_linear:
            block = with_parts(
                block, lambda name, part: BiasedExpert if name == "linear_fc2" and part is RowParallelLinear else part
            )
    if architecture.mlp_layers is not None:
        first = get_transformer_layer_offset(config, vp_stage)
        block.layer_specs = [
            with_one_part(layer, is_mlp=number in architecture.mlp_layers)
            for number, layer in enumerate(block.layer_specs, first)
        ]
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        if architecture.post_norms:
            with_post_norms(layer, block.layer_norm if with_te else MarkedNorm)
        if not architecture.pre_norms:
            without_pre_norms(layer, with_te=with_te)
        if architecture.qk_norm_over_heads:
            parts = layer.submodules.self_attention.submodules
            parts.q_layernorm, parts.k_layernorm = QueryNorm, KeyNorm
        if architecture.windows and architecture.windows.rotary_base:
            with_local_rotary(layer, architecture.windows.rotary_base)
        if architecture.latent_attention:
            with_latent_attention(layer, architecture.latent_attention, with_te=with_te)
    return block


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


_COLUMNS = 8
"""In which sinks are laid beside the keys: torch's fused attention wants multiples of eight."""


class SegmentAttention(MegatronModule):
    """`core_attention` of a layer's spec. Causal or within a window, with sinks or without, and without dropout."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if has_window else None
        self._scale = softmax_scale
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = nn.Parameter(torch.empty(heads)) if config.softmax_type == "learnable" else None
        self.register_parameter("softmax_offset", sinks)

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
            key, value = (whole_row(each, packed_seq_params.share) for each in (key, value))
        key, value = (_repeated(each, query.shape[-2]) for each in (key, value))
        if packed_seq_params is None:
            queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            return self._attend(queries, keys, values, 0).permute(2, 0, 1, 3).flatten(2)
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
            outputs.append(self._attend(asking, key, value, before + start))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """[B, heads, S, d]; the first query is the one of the key at `start`."""
        if not start and self._window is None and self.softmax_offset is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        seen = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(start)
        if self._window is not None:
            seen = seen.triu(start - self._window)
        if self.softmax_offset is None:
            return scaled_dot_product_attention(query, key, value, seen, scale=self._scale)
        return self._beside_sinks(query, key, value, seen)

    def _beside_sinks(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """A sink is a key before the others: its product with every query is the sink's logit, its value is zero."""
        size = query.shape[3]
        scale = self._scale or size**-0.5
        logits = (self.softmax_offset / (scale * _COLUMNS)).to(key.dtype)[:, None, None]
        sink = pad(logits.expand(len(key), -1, 1, _COLUMNS), (size, 0))
        keys = torch.cat([sink, pad(key, (0, _COLUMNS))], dim=2)
        output = scaled_dot_product_attention(
            pad(query, (0, _COLUMNS), value=1.0),
            keys,
            pad(value, (0, _COLUMNS, 1, 0)),
            pad(seen, (1, 0), value=True),
            scale=scale,
        )
        return output[..., : value.shape[3]]


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


def whole_row(tensor: Tensor, share: Share) -> Tensor:
    """[T, …] of the whole row; a gradient goes back to the rank whose part it is of, summed over all."""
    parts: Tensor = gather_from_sequence_parallel_region(tensor.contiguous(), group=share.group)
    return parts[share.order]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    times = heads // tensor.shape[-2]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=-2)
