"""A model's architecture in Megatron's words, and what all families read alike from a config.json. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError

_FLOAT32_PRECISION = 2.0**-23


def is_same_setting(one: Any, other: Any) -> bool:
    """Compares settings. Two floats are equal to float32, in which converters write 1e-5 as 9.999999747378752e-06."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_FLOAT32_PRECISION)
    return bool(one == other)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretched rotary frequencies (config.json: rope_scaling of type llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN's stretched rotary frequencies (https://arxiv.org/abs/2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    has_exact_range: bool
    """The range of frequencies that are mixed is not widened to whole numbers."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Rotary frequencies so many times slower (config.json: rope_scaling of type linear)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers whose attention sees the last tokens only."""

    size: int
    """So many tokens, the asking one among them."""
    layers: Sequence[int]
    """Counted from 0."""
    rotary_base: float | None = None
    """They turn by plain frequencies of this base; None: like the other layers."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in every layer that is not among `dense_layers`."""

    count: int
    ffn_hidden_size: int
    topk: int
    dense_layers: Sequence[int]
    shared_ffn_hidden_size: int | None
    """All shared experts together; None: there are none."""
    score_function: str
    """softmax or sigmoid"""
    normalized: bool
    """The weights of a token's experts sum to one (before scaling)."""
    scaling_factor: float | None = None
    has_shared_gate: bool = False
    """The shared experts' output is multiplied by a sigmoid gate of the token."""
    has_router_bias: bool = False
    """A bias per expert that chooses experts and does not weigh them (https://arxiv.org/abs/2408.15664)."""
    num_groups: int | None = None
    """Experts come in groups, of which a token sees `groups_per_token`; None: no groups."""
    groups_per_token: int | None = None

    def in_layer(self, layer: int) -> bool:
        """True when the layer (counted from 0) has experts."""
        return layer not in self.dense_layers


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434)."""

    q_lora_rank: int | None
    """None: queries are projected in one step."""
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Layers that have a gated delta net (https://arxiv.org/abs/2412.06464) in the place of attention."""

    layers: Sequence[int]
    """Counted from 0."""
    conv_kernel_dim: int
    key_head_dim: int
    value_head_dim: int
    num_key_heads: int
    num_value_heads: int
    is_interleaved: bool
    """The checkpoint has its projections in two tensors, one key head's rows after the other's; else in four."""


@dataclass(frozen=True, slots=True)
class Mamba:
    """Layers that have a Mamba-2 mixer (https://arxiv.org/abs/2405.21060) in the place of attention."""

    layers: Sequence[int]
    """Counted from 0."""
    conv_kernel_dim: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Heads of a group have the same B and C, and one norm."""
    state_size: int

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the input projection: gate, values, B, C, time steps."""
        values, states = self.num_heads * self.head_dim, self.num_groups * self.state_size
        return values, values, states, states, self.num_heads


@dataclass(frozen=True, slots=True)
class Vision:
    """The part of a model that turns images into embeddings. It is kept as it is: the decoder alone is trained."""

    image_token_id: int
    """Stands in a prompt once for each embedding of an image."""
    patch_values: int
    """Numbers of a patch, as the image processor gives them."""
    merge_size: int
    """merge_size × merge_size patches become one embedding"""
    rotary_axes: Sequence[int]
    """The axis with which each rotary frequency turns: a token's place in time (0), from the top (1) or from the left
    (2); M-RoPE, https://arxiv.org/abs/2409.12191."""
    tower: str
    """The beginning of the names of its tensors."""
    deepstack: int = 0
    """So many decoder layers, from the first on, have features of the tower's own layers added to their output where
    an image is (https://arxiv.org/abs/2406.04334)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder; names are Megatron's."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    vocab_size: int
    rotary_base: float
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    norm_epsilon: float
    normalization: str = "RMSNorm"
    swiglu: bool
    """Else the MLP's gate has GELU, in its tanh form."""
    squared_relu: bool = False
    """MLPs have no gate, and squared ReLU."""
    scaled_embeddings: bool = False
    """They are multiplied by √hidden_size, rounded to their type, and the output layer is not."""
    softmax_scale: float | None = None
    """None: 1 / √kv_channels."""
    qk_layernorm: bool = False
    qk_norm_over_heads: bool = False
    """The norm of queries is over all heads together, and so is the norm of keys; else over each head."""
    add_qkv_bias: bool
    pre_norms: bool = True
    """Norms before attention and MLP."""
    post_norms: bool = False
    """Norms behind attention and MLP too, before the residual is added."""
    unrotated_layers: Sequence[int] = ()
    """Layers, counted from 0, whose attention has no positions at all."""
    untie_embeddings_and_output_weights: bool
    rope_scaling: Llama3Rope | YarnRope | LinearRope | None
    experts: Experts | None = None
    windows: Windows | None = None
    attention_sinks: bool = False
    """Each head has one more logit than it has keys, which is learned and takes weight from them
    (https://arxiv.org/abs/2309.17453)."""
    add_bias_linear: bool = False
    """Every linear layer has a bias: those of attention, of routers and of experts."""
    swiglu_limit: float | None = None
    """Gate and up are clamped to it; gate × sigmoid(1.702 gate) × (up + 1) is in the place of SwiGLU."""
    latent_attention: LatentAttention | None = None
    linear_attention: LinearAttention | Mamba | None = None
    mlp_layers: Sequence[int] | None = None
    """Layers, counted from 0, that are an MLP or experts alone; the others are attention alone. None: each has both."""
    attention_output_gate: bool = False
    """Each head's output is multiplied by a sigmoid gate, which the query projection gives too."""
    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight."""
    kept: Sequence[str] = ()
    """The beginnings of names of tensors that are not trained and stay as they are: of layers that predict further
    tokens, of a vision tower."""
    vision: Vision | None = None
    """None: a model of text alone."""


def read_decoder(raw: Mapping[str, Any], **particular: Any) -> Architecture:
    """A dense Llama-like decoder; `particular` are the fields in which the family differs."""
    if "windows" not in particular:
        _require_whole_attention(raw)
    heads = raw["num_attention_heads"]
    rope = rope_parameters(raw)
    fields: dict[str, Any] = {
        "family": raw["model_type"],
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": raw.get("num_key_value_heads") or heads,
        "kv_channels": raw.get("head_dim") or raw["hidden_size"] // heads,
        "max_position_embeddings": raw["max_position_embeddings"],
        "vocab_size": raw["vocab_size"],
        "rotary_base": float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "norm_epsilon": raw["rms_norm_eps"],
        "swiglu": "swiglu" in particular or _is_swiglu(raw),
        "add_qkv_bias": bool(raw.get("attention_bias", False)),
        "untie_embeddings_and_output_weights": not raw.get("tie_word_embeddings", False),
        "rope_scaling": None if "rope_scaling" in particular else llama3_rope(raw),
    }
    return Architecture(**fields | particular)


def rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's rotary frequencies: transformers 5 writes rope_parameters, older versions rope_scaling."""
    found: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return found


def rope_type(raw: Mapping[str, Any]) -> str:
    """The kind of rotary scaling: default, llama3, yarn and others."""
    rope = rope_parameters(raw)
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_of_layers(raw: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Of one kind of layers. transformers 5 writes both kinds, older versions those of full attention."""
    written = raw.get("rope_parameters") or {}
    if kind in written:
        return dict(written[kind])
    stretched = (raw.get("rope_scaling") or {}) if kind == "full_attention" else {}
    return {"rope_theta": raw.get("rope_theta")} | stretched


def rotary_percent(raw: Mapping[str, Any], default: float) -> float:
    """The part of each head that turns; `default` if nothing is said."""
    return float(raw.get("partial_rotary_factor") or rope_parameters(raw).get("partial_rotary_factor") or default)


def layers_behind(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the layers behind the last, which predict further tokens."""
    last = raw["num_hidden_layers"]
    return tuple(f"model.layers.{last + n}." for n in range(raw.get("num_nextn_predict_layers") or 0))


def llama3_rope(raw: Mapping[str, Any]) -> Llama3Rope | None:
    """None for plain frequencies; raises ConfigError for other ways of stretching."""
    if (kind := rope_type(raw)) == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope_scaling of type {kind!r} is not supported; supported: default, llama3")
    rope = rope_parameters(raw)
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def yarn_rope(raw: Mapping[str, Any]) -> YarnRope | None:
    """None for plain frequencies; raises ConfigError for other ways of stretching."""
    if (kind := rope_type(raw)) == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope_scaling of type {kind!r} is not supported; supported: default, yarn")
    rope = rope_parameters(raw)
    return YarnRope(
        factor=float(rope["factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(rope.get("mscale") or 1.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        has_exact_range=not rope.get("truncate", True),
    )


def linear_rope(raw: Mapping[str, Any]) -> LinearRope | None:
    """None for plain frequencies; raises ConfigError for other ways of stretching."""
    if (kind := rope_type(raw)) == "default":
        return None
    if kind != "linear":
        raise ConfigError(f"rope_scaling of type {kind!r} is not supported; supported: default, linear")
    return LinearRope(float(rope_parameters(raw)["factor"]))


def _require_whole_attention(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for layers that attend within a window."""
    windowed = [number for number, kind in enumerate(raw.get("layer_types") or ()) if kind != "full_attention"]
    if windowed or raw.get("use_sliding_window"):
        which = f"layer {windowed[0]} is {raw['layer_types'][windowed[0]]!r}" if windowed else "use_sliding_window true"
        raise ConfigError(f"{which}: headrace trains windows in gpt_oss, olmo3 and gemma3 only")


def read_windows(raw: Mapping[str, Any], full_every: int, rotary_base: float | None = None) -> Windows | None:
    """Layers with windows: those that the config names, else all but every `full_every`-th."""
    if raw.get("sliding_window") is None:
        return None
    layers = range(raw["num_hidden_layers"])
    kinds = raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in layers
    ]
    within = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
    return Windows(raw["sliding_window"], within, rotary_base)


def _is_swiglu(raw: Mapping[str, Any]) -> bool:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    return True


def read_sigmoid_experts(raw: Mapping[str, Any]) -> Experts:
    """Reads the experts from a config.json. Raises ConfigError for routing that Megatron-core does not support."""
    topk, groups, per_token = raw["num_experts_per_tok"], raw.get("n_group") or 1, raw.get("topk_group") or 1
    if not raw.get("norm_topk_prob", True):
        raise ConfigError("norm_topk_prob false with sigmoid scores is not what Megatron-core computes")
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        raise ConfigError(f"scoring_func {raw['scoring_func']!r} is not supported; supported: 'sigmoid'")
    if raw.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq {raw['moe_layer_freq']} is not supported; supported: 1")
    if groups > 1 and topk // per_token != 2:
        raise ConfigError(
            f"num_experts_per_tok {topk} over topk_group {per_token}: the checkpoint ranks groups by their two best "
            f"experts, Megatron-core by their {topk // per_token} best"
        )
    width = raw["moe_intermediate_size"]
    return Experts(
        count=raw["n_routed_experts"],
        ffn_hidden_size=width,
        topk=topk,
        dense_layers=_dense_layers(raw),
        shared_ffn_hidden_size=width * raw["n_shared_experts"] if raw.get("n_shared_experts") else None,
        score_function="sigmoid",
        normalized=True,
        scaling_factor=float(raw["routed_scaling_factor"]),
        has_router_bias=True,
        num_groups=groups if groups > 1 else None,
        groups_per_token=per_token if groups > 1 else None,
    )


def _dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The first few; transformers 5 writes the kind of each layer."""
    if kinds := raw.get("mlp_layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(min(raw["first_k_dense_replace"], raw["num_hidden_layers"])))


def read_softmax_experts(raw: Mapping[str, Any]) -> Experts:
    """Reads the experts of Qwen2-MoE and Qwen3-MoE from a config.json: softmax scores, at most one shared expert."""
    return Experts(
        # transformers 5 renamed it when it writes a config
        count=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        topk=raw["num_experts_per_tok"],
        dense_layers=_layers_between(raw),
        shared_ffn_hidden_size=raw.get("shared_expert_intermediate_size"),
        score_function="softmax",
        normalized=bool(raw["norm_topk_prob"]),
        has_shared_gate=raw.get("shared_expert_intermediate_size") is not None,
    )


def _layers_between(raw: Mapping[str, Any]) -> tuple[int, ...]:
    only, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step") or 1
    return tuple(n for n in range(raw["num_hidden_layers"]) if n in only or (n + 1) % step)
