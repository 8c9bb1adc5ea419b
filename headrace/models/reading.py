"""Reading what all families' config.json files have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, Llama3Rope, YarnRope


def read_decoder(raw: Mapping[str, Any], **particular: Any) -> Architecture:
    """A dense Llama-like decoder; `particular` are the fields in which the family differs."""
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
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "norm_epsilon": raw["rms_norm_eps"],
        "normalization": "RMSNorm",
        "swiglu": _is_swiglu(raw),
        "qk_layernorm": False,
        "add_qkv_bias": bool(raw.get("attention_bias", False)),
        "post_norms": False,
        "unrotated_layers": (),
        "untie_embeddings_and_output_weights": not raw.get("tie_word_embeddings", False),
        "rope_scaling": llama3_rope(raw),
        "experts": None,
        "latent_attention": None,
        "num_mtp_layers": 0,
        "vision": None,
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


def rotary_percent(raw: Mapping[str, Any]) -> float:
    """GLM turns only a part of each head, a half if nothing is said."""
    return float(raw.get("partial_rotary_factor") or rope_parameters(raw).get("partial_rotary_factor") or 0.5)


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
    )


def _require_whole_attention(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for layers that attend within a window."""
    windowed = [number for number, kind in enumerate(raw.get("layer_types") or ()) if kind != "full_attention"]
    if windowed or raw.get("use_sliding_window"):
        which = f"layer {windowed[0]} is {raw['layer_types'][windowed[0]]!r}" if windowed else "use_sliding_window true"
        raise ConfigError(f"{which}: headrace trains full attention only")


def _is_swiglu(raw: Mapping[str, Any]) -> bool:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    return True
