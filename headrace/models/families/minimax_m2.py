"""MiniMax-M2: norms over all heads, half of each head turned, sigmoid routing with a bias in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, Experts, read_decoder, rotary_percent
from headrace.models.family import (
    SHARED_OPTIMIZER,
    Family,
    Preset,
    Replicated,
    Row,
    Table,
    attention,
    embedding,
    head,
    mlp,
    norm,
    one,
)

_ONLY: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def read(raw: Mapping[str, Any]) -> Architecture:
    for name, wanted in _ONLY.items():
        if raw.get(name, wanted) != wanted:
            raise ConfigError(f"{name} {raw[name]!r} is not supported; supported: {wanted!r}")
    turned = raw["rotary_dim"] / raw["head_dim"] if raw.get("rotary_dim") else rotary_percent(raw, 1.0)
    return read_decoder(
        raw,
        rotary_percent=turned,
        qk_layernorm=True,
        qk_norm_over_heads=True,
        kept=tuple(f"model.layers.{raw['num_hidden_layers'] + n}." for n in range(raw.get("num_mtp_modules") or 0)),
        experts=Experts(
            count=raw["num_local_experts"],
            ffn_hidden_size=raw["intermediate_size"],
            topk=raw["num_experts_per_tok"],
            dense_layers=(),
            shared_ffn_hidden_size=None,
            score_function="sigmoid",
            normalized=True,
            has_router_bias=True,
        ),
    )


def table(a: Architecture) -> Table:
    def layer(number: int) -> Sequence[Row]:
        hf = f"model.layers.{number}"
        return [
            norm("input_layernorm", f"{hf}.input_layernorm", a.hidden_size),
            *attention(a, hf),
            norm("pre_mlp_layernorm", f"{hf}.post_attention_layernorm", a.hidden_size),
            *(_mixture(a, a.experts, f"{hf}.block_sparse_moe") if a.experts else ()),
        ]

    return Table(embedding(a), layer, head(a), a.num_layers)


def _mixture(a: Architecture, experts: Experts, hf: str) -> list[Row]:
    rows = [
        one("mlp.router.weight", f"{hf}.gate.weight", (experts.count, a.hidden_size), Replicated()),
        one("mlp.router.expert_bias", f"{hf}.e_score_correction_bias", (experts.count,), Replicated()),
    ]
    for expert in range(experts.count):
        place, name = "mlp.experts.local_experts.{expert}", f"{hf}.experts.{expert}"
        rows += mlp(a, place, name, experts.ffn_hidden_size, expert, names=("w1", "w3", "w2"))
    return rows


_M2 = {
    "model_type": "minimax_m2",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
# 62 layers: seven stages of eight and one of six.
_LAYOUT = {
    "pipeline_model_parallel_size": 8,
    "num_layers_in_last_pipeline_stage": 6,
    "expert_model_parallel_size": 32,
    **SHARED_OPTIMIZER,
}

FAMILY = Family(
    model_types=("minimax_m2",),
    read=read,
    table=table,
    presets=(Preset("minimax-m2", _M2, 229e9, _LAYOUT),),
)
