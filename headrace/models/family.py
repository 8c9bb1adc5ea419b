"""A model family as data: how to read it, its presets, and the table of Hugging Face's tensors and Megatron's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from headrace.models.architecture import Architecture, Experts, LatentAttention, LinearAttention, Mamba

# The rows of a table: for each Megatron parameter its Hugging Face tensors, and how tensor parallelism divides it.
#
# Shapes are out × in for weights; a bias has no `in`.


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every tensor rank: norms, routers."""


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along one dimension: 0 for column-parallel layers and embeddings, 1 for row-parallel layers."""

    dim: int


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate and up, each cut along its rows; a rank holds its gate rows, then its up rows."""


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """Divided like GateUp; one tensor has all gate rows and then all up rows."""


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """q, k and v interleaved by query group: each group's query heads, its key head, its value head."""

    num_query_groups: int
    heads_per_group: int
    head_size: int
    has_gates: bool = False
    """In the checkpoint each query head's gate follows it; a group has its gates behind its query heads."""


@dataclass(frozen=True, slots=True)
class Sections:
    """Tensors of several sections of rows, each cut; a rank holds its rows of the first section, then of the next."""

    sizes: tuple[tuple[int, ...], ...]
    """The rows of each tensor's sections."""
    times: int = 1
    """So often each tensor repeats its sections, with as many times fewer rows."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """in × out in the checkpoint. Cut along `in`: of a row-parallel layer."""


@dataclass(frozen=True, slots=True)
class TransposedGateUp:
    """Divided like GateUp; one tensor, in × out, has gate and up in turns along `out`."""


Sharding = Replicated | Split | GateUp | FusedGateUp | QueryKeyValue | Sections | Transposed | TransposedGateUp


Stacks = Sequence[tuple[str, Sharding]]
"""The tensors of a folder that stacks a layer's experts: of gate and up, of down. Empty for a family that has none."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint, or one of the experts' in a tensor that holds those of a layer."""

    name: str
    shape: tuple[int, ...]
    slot: int | None = None
    """Its place along a first dimension that `shape` leaves out."""
    slots: int = 1
    """The size of that dimension. The rows of all its slots follow each other."""

    @property
    def key(self) -> str:
        """The name, and the slot where others have the same name."""
        return self.name if self.slot is None else f"{self.name}.{self.slot}"

    @property
    def whole(self) -> HfTensor:
        """The tensor of the checkpoint that has this name."""
        return self if self.slot is None else HfTensor(self.name, (self.slots, *self.shape))


@dataclass(frozen=True, slots=True)
class Row:
    """`megatron` is made of `hf`, in this order. In a layer's rows `megatron` begins below the layer."""

    megatron: str
    hf: tuple[HfTensor, ...]
    sharding: Sharding
    expert: int | None = None
    """The expert that it is a part of; its Megatron name then has {expert}, counted within the rank."""
    stack: Row | None = None
    """Its row in a folder that has a layer's experts in one tensor. Such folders are read, never written."""


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of a model, in the order in which tensors travel."""

    first: Sequence[Row]
    """The first stage's rows: the embedding."""
    layer: Callable[[int], Sequence[Row]]
    """A layer's rows; layers are counted from 0 over the whole model."""
    last: Sequence[Row]
    """The last stage's rows: final norm and output layer."""
    num_layers: int

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the first stage, of each layer, and of the last stage."""
        yield from self.first
        for layer in range(self.num_layers):
            yield from self.layer(layer)
        yield from self.last

    def tensors(self) -> Iterator[HfTensor]:
        """The tensors of the Hugging Face checkpoint."""
        for row in self.rows():
            yield from (tensor.whole for tensor in row.hf if not tensor.slot)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors())


def one(megatron: str, hf: str, shape: tuple[int, ...], sharding: Sharding) -> Row:
    """A row of a single tensor."""
    return Row(megatron, (HfTensor(hf, shape),), sharding)


def norm(megatron: str, hf: str, size: int) -> Row:
    """The row of a norm's weight."""
    return one(f"{megatron}.weight", f"{hf}.weight", (size,), Replicated())


def embedding(a: Architecture, hf: str = "model") -> list[Row]:
    """The rows before the layers."""
    shape = (a.vocab_size, a.hidden_size)
    return [one("embedding.word_embeddings.weight", f"{hf}.embed_tokens.weight", shape, Split(0))]


def head(a: Architecture, hf: str = "model") -> list[Row]:
    """The rows behind the layers."""
    rows = [norm("decoder.final_layernorm", f"{hf}.norm", a.hidden_size)]
    if a.untie_embeddings_and_output_weights:
        rows.append(one("output_layer.weight", "lm_head.weight", (a.vocab_size, a.hidden_size), Split(0)))
    return rows


def attention(a: Architecture, hf: str) -> list[Row]:
    """Grouped-query attention, with biases, norms and gates where the architecture has them."""
    gates = a.attention_output_gate
    qkv = QueryKeyValue(a.num_query_groups, a.num_attention_heads // a.num_query_groups, a.kv_channels, gates)
    heads = (a.num_attention_heads * (1 + gates), a.num_query_groups, a.num_query_groups)
    sizes = [number * a.kv_channels for number in heads]
    names = [f"{hf}.self_attn.{part}_proj" for part in "qkv"]
    weights = tuple(HfTensor(f"{n}.weight", (size, a.hidden_size)) for n, size in zip(names, sizes, strict=True))
    rows = [Row("self_attention.linear_qkv.weight", weights, qkv)]
    if a.add_qkv_bias:
        biases = tuple(HfTensor(f"{n}.bias", (size,)) for n, size in zip(names, sizes, strict=True))
        rows.append(Row("self_attention.linear_qkv.bias", biases, qkv))
    if a.qk_layernorm:
        widths = sizes if a.qk_norm_over_heads else [a.kv_channels] * 2
        rows += [
            norm(f"self_attention.{p}_layernorm", f"{hf}.self_attn.{p}_norm", width)
            for p, width in zip("qk", widths, strict=False)
        ]
    output = (a.hidden_size, a.num_attention_heads * a.kv_channels)
    rows.append(one("self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", output, Split(1)))
    if a.add_bias_linear:
        rows.append(one("self_attention.linear_proj.bias", f"{hf}.self_attn.o_proj.bias", output[:1], Replicated()))
    return rows


def latent_attention(a: Architecture, mla: LatentAttention, hf: str) -> list[Row]:
    """Multi-head latent attention: down to a latent, a norm, up to the heads."""
    mega, hf = "self_attention", f"{hf}.self_attn"
    heads, q_head = a.num_attention_heads, mla.qk_head_dim + mla.qk_pos_emb_head_dim
    latent, rank = mla.kv_lora_rank, mla.q_lora_rank
    down = (latent + mla.qk_pos_emb_head_dim, a.hidden_size)
    up = (heads * (mla.qk_head_dim + mla.v_head_dim), latent)
    output = (a.hidden_size, heads * mla.v_head_dim)
    key_value_down = one(f"{mega}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", down, Split(0))
    if rank is None:
        whole = (heads * q_head, a.hidden_size)
        query = [one(f"{mega}.linear_q_proj.weight", f"{hf}.q_proj.weight", whole, Split(0)), key_value_down]
    else:
        query = [
            one(f"{mega}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight", (rank, a.hidden_size), Split(0)),
            key_value_down,  # engines fuse the two
            norm(f"{mega}.q_layernorm", f"{hf}.q_a_layernorm", rank),
            one(f"{mega}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", (heads * q_head, rank), Split(0)),
        ]
    return [
        *query,
        norm(f"{mega}.kv_layernorm", f"{hf}.kv_a_layernorm", latent),
        one(f"{mega}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", up, Split(0)),
        one(f"{mega}.linear_proj.weight", f"{hf}.o_proj.weight", output, Split(1)),
    ]


def linear_attention(a: Architecture, linear: LinearAttention, hf: str) -> list[Row]:
    """A gated delta net: projections to q, k, v, z, b and a, a convolution over q, k and v, decays, a gated norm."""
    mega, hf = "self_attention", f"{hf}.linear_attn"
    heads = linear.num_value_heads
    key, value = linear.num_key_heads * linear.key_head_dim, heads * linear.value_head_dim
    sections: dict[str, tuple[int, ...]] = (
        {"qkvz": (key, key, value, value), "ba": (heads, heads)}
        if linear.is_interleaved
        else {"qkv": (key, key, value), "z": (value,), "b": (heads,), "a": (heads,)}
    )
    inputs = tuple(HfTensor(f"{hf}.in_proj_{part}.weight", (sum(n), a.hidden_size)) for part, n in sections.items())
    times = linear.num_key_heads if linear.is_interleaved else 1
    kernel = (2 * key + value, 1, linear.conv_kernel_dim)
    return [
        Row(f"{mega}.linear_qkv.weight", inputs, Sections(tuple(sections.values()), times)),
        one(f"{mega}.conv1d.weight", f"{hf}.conv1d.weight", kernel, Sections(((key, key, value),))),
        one(f"{mega}.dt_bias", f"{hf}.dt_bias", (heads,), Split(0)),
        one(f"{mega}.A_log", f"{hf}.A_log", (heads,), Split(0)),
        norm(f"{mega}.out_norm", f"{hf}.norm", linear.value_head_dim),
        one(f"{mega}.linear_proj.weight", f"{hf}.out_proj.weight", (a.hidden_size, value), Split(1)),
    ]


def mamba(a: Architecture, mixer: Mamba, hf: str) -> list[Row]:
    """A Mamba-2 mixer: one projection, a convolution over values, B and C, decays, a norm of each group."""
    mega, heads, (_, *convolved, _) = "self_attention", mixer.num_heads, mixer.sections
    inputs, channels = (sum(mixer.sections), a.hidden_size), sum(convolved)
    kernel, cut = (channels, 1, mixer.conv_kernel_dim), Sections((tuple(convolved),))
    values = heads * mixer.head_dim
    return [
        one(f"{mega}.linear_qkv.weight", f"{hf}.in_proj.weight", inputs, Sections((mixer.sections,))),
        one(f"{mega}.conv1d.weight", f"{hf}.conv1d.weight", kernel, cut),
        one(f"{mega}.conv1d.bias", f"{hf}.conv1d.bias", (channels,), cut),
        *(one(f"{mega}.{part}", f"{hf}.{part}", (heads,), Split(0)) for part in ("dt_bias", "A_log", "D")),
        one(f"{mega}.out_norm.weight", f"{hf}.norm.weight", (values,), Split(0)),
        one(f"{mega}.linear_proj.weight", f"{hf}.out_proj.weight", (a.hidden_size, values), Split(1)),
    ]


MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def mlp(
    a: Architecture,
    megatron: str,
    hf: str,
    width: int,
    expert: int | None = None,
    names: tuple[str, str, str] = MLP_NAMES,
) -> list[Row]:
    """An MLP of `width`; `names` are those of gate (where it has one), up and down."""
    inputs = tuple(HfTensor(f"{hf}.{name}.weight", (width, a.hidden_size)) for name in names[a.squared_relu : 2])
    down = (HfTensor(f"{hf}.{names[2]}.weight", (a.hidden_size, width)),)
    return [
        Row(f"{megatron}.linear_fc1.weight", inputs, Split(0) if a.squared_relu else GateUp(), expert),
        Row(f"{megatron}.linear_fc2.weight", down, Split(1), expert),
    ]


def mixture(a: Architecture, experts: Experts, hf: str, stacks: Stacks = ()) -> list[Row]:
    """Router, shared experts and experts, in the order of the experts."""
    gate = (experts.count, a.hidden_size)
    rows = [one("mlp.router.weight", f"{hf}.mlp.gate.weight", gate, Replicated())]
    if experts.has_router_bias:
        name = f"{hf}.mlp.gate.e_score_correction_bias"
        rows.append(one("mlp.router.expert_bias", name, (experts.count,), Replicated()))
    if experts.shared_ffn_hidden_size is not None:
        name = f"{hf}.mlp.shared_expert" + ("" if experts.has_shared_gate else "s")
        rows += mlp(a, "mlp.shared_experts", name, experts.shared_ffn_hidden_size)
    if experts.has_shared_gate:
        gate = (1, a.hidden_size)
        rows.append(one("mlp.shared_experts.gate_weight", f"{hf}.mlp.shared_expert_gate.weight", gate, Replicated()))
    for expert in range(experts.count):
        name = f"{hf}.mlp.experts.{expert}"
        parts = mlp(a, "mlp.experts.local_experts.{expert}", name, experts.ffn_hidden_size, expert)
        rows += [_with_stack(*each, f"{hf}.mlp.experts", experts.count) for each in zip_longest(parts, stacks)]
    return rows


def _with_stack(row: Row, stack: tuple[str, Sharding] | None, hf: str, count: int) -> Row:
    if stack is None:
        return row
    name, sharding = stack
    shape = (sum(tensor.shape[0] for tensor in row.hf), *row.hf[0].shape[1:])
    return replace(row, stack=replace(row, hf=(HfTensor(f"{hf}.{name}", shape, row.expert, count),), sharding=sharding))


def decoder(a: Architecture, name: str = "model", stacks: Stacks = ()) -> Table:
    """Pre-norm layers of attention and MLP, each of the kind that the architecture says."""

    def mixer(number: int, hf: str) -> list[Row]:
        if isinstance(a.linear_attention, LinearAttention) and number in a.linear_attention.layers:
            return linear_attention(a, a.linear_attention, hf)
        return latent_attention(a, a.latent_attention, hf) if a.latent_attention else attention(a, hf)

    def layer(number: int) -> Sequence[Row]:
        hf = f"{name}.layers.{number}"
        mixed = a.experts if a.experts and a.experts.in_layer(number) else None
        return [
            norm("input_layernorm", f"{hf}.input_layernorm", a.hidden_size),
            *mixer(number, hf),
            norm("pre_mlp_layernorm", f"{hf}.post_attention_layernorm", a.hidden_size),
            *(mixture(a, mixed, hf, stacks) if mixed else mlp(a, "mlp", f"{hf}.mlp", a.ffn_hidden_size)),
        ]

    return Table(embedding(a, name), layer, head(a, name), a.num_layers)


SHARED_OPTIMIZER: Mapping[str, int] = {"use_distributed_optimizer": True}
"""What is not an expert is on every expert rank, its optimizer states then only once."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model: the values of its config.json, its size, and a layout to start from."""

    name: str
    config: Mapping[str, Any]
    published_parameters: float
    layout: Mapping[str, int]
    """Megatron's arguments of that. Arithmetic for bfloat16 on GPUs with 80 GB, not run."""


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that headrace must know about a family, as data and two functions."""

    model_types: Sequence[str]
    """config.json's model_type."""
    read: Callable[[Mapping[str, Any]], Architecture]
    """Reads a config.json; raises ConfigError for what headrace cannot do."""
    table: Callable[[Architecture], Table] = decoder
    presets: Sequence[Preset] = field(default=())
