"""Nemotron-H: each layer is a Mamba-2 mixer, attention without positions, an MLP with squared ReLU, or experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, Mamba, read_decoder, read_sigmoid_experts
from headrace.models.family import (
    SHARED_OPTIMIZER,
    Family,
    Preset,
    Row,
    Table,
    attention,
    embedding,
    head,
    mamba,
    mixture,
    mlp,
    norm,
)

_ONLY: Mapping[str, Any] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": False,
    "moe_latent_size": None,
    "sliding_window": None,
}
_UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""As it is published, and as transformers 5 writes it."""
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}


def read(raw: Mapping[str, Any]) -> Architecture:
    for name, wanted in _ONLY.items():
        if raw.get(name, wanted) != wanted:
            raise ConfigError(f"{name} {raw[name]!r} is not supported; supported: {wanted!r}")
    if (limit := raw.get("time_step_limit", _UNLIMITED[0])) not in _UNLIMITED:
        raise ConfigError(f"time_step_limit {limit} is not supported; supported: {_UNLIMITED[0]}")
    kinds = _layer_kinds(raw)
    plain = {name: value for name, value in raw.items() if name != "layer_types"}
    layers = range(len(kinds))
    experts = None
    if "moe" in kinds:
        routed = read_sigmoid_experts({**raw, "mlp_layer_types": ["sparse" if k == "moe" else "dense" for k in kinds]})
        experts = replace(routed, shared_ffn_hidden_size=raw["moe_shared_expert_intermediate_size"])
    return read_decoder(
        plain | {"num_hidden_layers": len(kinds), "rms_norm_eps": raw["layer_norm_epsilon"]},
        swiglu=False,
        squared_relu=True,
        unrotated_layers=tuple(layers),
        mlp_layers=tuple(layer for layer in layers if kinds[layer] in ("mlp", "moe")),
        experts=experts,
        linear_attention=Mamba(
            layers=tuple(layer for layer in layers if kinds[layer] == "mamba"),
            conv_kernel_dim=raw["conv_kernel"],
            num_heads=raw["mamba_num_heads"],
            head_dim=raw["mamba_head_dim"],
            num_groups=raw["n_groups"],
            state_size=raw["ssm_state_size"],
        ),
        kept=("mtp.",) if raw.get("num_nextn_predict_layers") else (),
    )


def _layer_kinds(raw: Mapping[str, Any]) -> Sequence[str]:
    """A letter for each layer; transformers 5 writes words."""
    if pattern := raw.get("hybrid_override_pattern"):
        return [_KINDS[letter] for letter in pattern]
    return [_RENAMED.get(kind, kind) for kind in raw["layers_block_type"]]


def table(a: Architecture) -> Table:
    mixer, alone = a.linear_attention, a.mlp_layers
    assert isinstance(mixer, Mamba)
    assert alone is not None

    def layer(number: int) -> Sequence[Row]:
        hf = f"backbone.layers.{number}"
        is_mlp = number in alone
        rows = [norm("pre_mlp_layernorm" if is_mlp else "input_layernorm", f"{hf}.norm", a.hidden_size)]
        if number in mixer.layers:
            return rows + mamba(a, mixer, f"{hf}.mixer")
        if not is_mlp:
            return _named(rows + attention(a, hf))
        mixed = a.experts if a.experts and a.experts.in_layer(number) else None
        return _named(rows + (mixture(a, mixed, hf) if mixed else mlp(a, "mlp", f"{hf}.mlp", a.ffn_hidden_size)))

    return Table(_named(embedding(a, "backbone")), layer, _named(head(a, "backbone")), a.num_layers)


_NAMES = {
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
    "backbone.embed_tokens.": "backbone.embeddings.",
    "backbone.norm.": "backbone.norm_f.",
}
"""What Llama's table calls otherwise."""


def _named(rows: Iterable[Row]) -> list[Row]:
    def name(of_llama: str) -> str:
        for old, new in _NAMES.items():
            of_llama = of_llama.replace(old, new)
        return of_llama

    return [replace(row, hf=tuple(replace(tensor, name=name(tensor.name)) for tensor in row.hf)) for row in rows]


_9B = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
_30B = _9B | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}

FAMILY = Family(
    model_types=("nemotron_h",),
    read=read,
    table=table,
    presets=(
        Preset("nemotron-nano-9B-v2", _9B, 8.89e9, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
        Preset("nemotron-3-nano-30B-A3B", _30B, 31.6e9, {"expert_model_parallel_size": 16, **SHARED_OPTIMIZER}),
    ),
)
