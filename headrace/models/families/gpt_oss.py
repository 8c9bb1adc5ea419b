"""gpt-oss: attention sinks, every second layer within a window, biases everywhere, a layer's experts in one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, Experts, read_decoder, read_windows, rope_parameters, yarn_rope
from headrace.models.family import (
    SHARED_OPTIMIZER,
    Family,
    HfTensor,
    Preset,
    Replicated,
    Row,
    Sharding,
    Split,
    Table,
    Transposed,
    TransposedGateUp,
    attention,
    embedding,
    head,
    norm,
    one,
)

_ROTARY_BASE = 150000.0
_ALPHA = 1.702


def read(raw: Mapping[str, Any]) -> Architecture:
    rope = rope_parameters(raw)
    for name, value, wanted in (
        ("attention_bias", raw.get("attention_bias", True), True),
        ("swiglu_alpha", raw.get("swiglu_alpha", _ALPHA), _ALPHA),
        ("attention_factor", rope.get("attention_factor"), None),
    ):
        if value != wanted:
            raise ConfigError(f"{name} {value} is not what Megatron-core computes, which has {wanted}")
    return read_decoder(
        raw,
        rotary_base=float(rope.get("rope_theta") or raw.get("rope_theta") or _ROTARY_BASE),
        rope_scaling=yarn_rope(raw),
        add_qkv_bias=True,
        add_bias_linear=True,
        attention_sinks=True,
        windows=read_windows(raw, full_every=2),
        swiglu_limit=float(raw["swiglu_limit"]),
        experts=Experts(
            count=raw["num_local_experts"],
            ffn_hidden_size=raw["intermediate_size"],
            topk=raw["num_experts_per_tok"],
            dense_layers=(),
            shared_ffn_hidden_size=None,
            score_function="softmax",
            normalized=True,
        ),
    )


def table(a: Architecture) -> Table:
    def layer(number: int) -> Sequence[Row]:
        hf = f"model.layers.{number}"
        sinks = f"{hf}.self_attn.sinks"
        return [
            norm("input_layernorm", f"{hf}.input_layernorm", a.hidden_size),
            *attention(a, hf),
            one("self_attention.core_attention.softmax_offset", sinks, (a.num_attention_heads,), Split(0)),
            norm("pre_mlp_layernorm", f"{hf}.post_attention_layernorm", a.hidden_size),
            *(_mixture(a, a.experts, f"{hf}.mlp") if a.experts else ()),
        ]

    return Table(embedding(a), layer, head(a), a.num_layers)


def _mixture(a: Architecture, experts: Experts, hf: str) -> list[Row]:
    hidden, width, count = a.hidden_size, experts.ffn_hidden_size, experts.count
    parts: Sequence[tuple[str, str, tuple[int, ...], Sharding]] = (
        ("linear_fc1.weight", "gate_up_proj", (hidden, 2 * width), TransposedGateUp()),
        ("linear_fc1.bias", "gate_up_proj_bias", (2 * width,), TransposedGateUp()),
        ("linear_fc2.weight", "down_proj", (width, hidden), Transposed()),
        ("linear_fc2.bias", "down_proj_bias", (hidden,), Replicated()),
    )
    return [
        one("mlp.router.weight", f"{hf}.router.weight", (count, hidden), Replicated()),
        one("mlp.router.bias", f"{hf}.router.bias", (count,), Replicated()),
        *(
            Row(
                f"mlp.experts.local_experts.{{expert}}.{megatron}",
                (HfTensor(f"{hf}.experts.{name}", shape, expert, count),),
                sharding,
                expert,
            )
            for megatron, name, shape, sharding in parts
            for expert in range(count)
        ),
    ]


_120B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
_20B = _120B | {"num_hidden_layers": 24, "num_local_experts": 32}
_LAYOUT = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 32, **SHARED_OPTIMIZER}

FAMILY = Family(
    model_types=("gpt_oss",),
    read=read,
    table=table,
    presets=(
        Preset("gpt-oss-20b", _20B, 20.91e9, {"expert_model_parallel_size": 8, **SHARED_OPTIMIZER}),
        Preset("gpt-oss-120b", _120B, 116.83e9, _LAYOUT),
    ),
)
