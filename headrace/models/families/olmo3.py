"""Olmo 3: norms behind attention and MLP and none before, norms over all heads, windows in three layers of four."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, read_decoder, read_windows, rope_of_layers, yarn_rope
from headrace.models.family import Family, Preset, Row, Table, attention, embedding, head, mlp, norm

_ROTARY_BASE = 500000.0


def read(raw: Mapping[str, Any]) -> Architecture:
    full, within = (rope_of_layers(raw, kind) for kind in ("full_attention", "sliding_attention"))
    if raw.get("attention_bias"):
        raise ConfigError("attention_bias true is not supported: no published Olmo 3 has biases")
    if within.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type {within['rope_type']!r} of sliding_attention is not supported: it is plain")
    scaling = yarn_rope({"rope_parameters": full})
    factor = full.get("attention_factor")
    if scaling and factor is not None and not math.isclose(factor, 0.1 * math.log(scaling.factor) + 1, rel_tol=1e-6):
        raise ConfigError(f"attention_factor {factor} is not what Megatron-core computes of factor {scaling.factor}")
    return read_decoder(
        raw,
        rotary_base=float(full.get("rope_theta") or _ROTARY_BASE),
        rope_scaling=scaling,
        qk_layernorm=True,
        qk_norm_over_heads=True,
        pre_norms=False,
        post_norms=True,
        windows=read_windows(raw, full_every=4, rotary_base=float(within.get("rope_theta") or _ROTARY_BASE)),
    )


def table(a: Architecture) -> Table:
    def layer(number: int) -> Sequence[Row]:
        hf = f"model.layers.{number}"
        return [
            *attention(a, hf),
            norm("self_attention.post_norm", f"{hf}.post_attention_layernorm", a.hidden_size),
            *mlp(a, "mlp", f"{hf}.mlp", a.ffn_hidden_size),
            norm("mlp.post_norm", f"{hf}.post_feedforward_layernorm", a.hidden_size),
        ]

    return Table(embedding(a), layer, head(a), a.num_layers)


def _config(hidden: int, mlp: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "model_type": "olmo3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "layer_types": ["full_attention" if n % 4 == 3 else "sliding_attention" for n in range(layers)],
        "max_position_embeddings": 65536,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    }


_7B = _config(4096, 11008, 32, 32, 32)
_32B = _config(5120, 27648, 64, 40, 8)
# The size of the vocabulary is even and no more.
_TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
_TP2_PP8 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 8}

FAMILY = Family(
    model_types=("olmo3",),
    read=read,
    table=table,
    presets=(
        Preset("olmo-3-7B", _7B, 7.3e9, _TP2_PP2),
        Preset("olmo-3-32B", _32B, 32.2e9, _TP2_PP8),
        Preset("olmo-3.1-32B", _32B, 32.2e9, _TP2_PP8),
    ),
)
