"""A model's architecture in Megatron's words. Families (headrace.models) read it from a config.json. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    scaling_factor: float | None
    has_shared_gate: bool
    """The shared experts' output is multiplied by a sigmoid gate of the token."""
    has_router_bias: bool
    """A bias per expert that chooses experts and does not weigh them (https://arxiv.org/abs/2408.15664)."""
    num_groups: int | None
    """Experts come in groups, of which a token sees `groups_per_token`; None: no groups."""
    groups_per_token: int | None

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
class Vision:
    """The part of a model that turns images into embeddings. It is kept as it is: the decoder alone is trained."""

    image_token_id: int
    """Stands in a prompt once for each embedding of an image."""
    patch_values: int
    """Numbers of a patch, as the image processor gives them."""
    merge_size: int
    """merge_size × merge_size patches become one embedding"""
    rotary_sections: Sequence[int]
    """Rotary frequencies that turn with a token's place in time, from the top and from the left
    (M-RoPE, https://arxiv.org/abs/2409.12191)."""


@dataclass(frozen=True, slots=True)
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
    rotary_percent: float
    rotary_interleaved: bool
    norm_epsilon: float
    normalization: str
    swiglu: bool
    qk_layernorm: bool
    add_qkv_bias: bool
    post_norms: bool
    """Norms behind attention and MLP too, before the residual is added."""
    unrotated_layers: Sequence[int]
    """Layers, counted from 0, whose attention has no positions at all."""
    untie_embeddings_and_output_weights: bool
    rope_scaling: Llama3Rope | YarnRope | None
    experts: Experts | None
    latent_attention: LatentAttention | None
    num_mtp_layers: int
    """Layers behind the last that predict further tokens; not trained, and kept as they are."""
    vision: Vision | None
    """None: a model of text alone."""
