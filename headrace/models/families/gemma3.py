"""Gemma 3: norms before and behind attention and MLP, windows in five layers of six, scaled embeddings, gated GELU.

The models from 4B on read images too. Their decoder is trained, on text, and what reads images is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, linear_rope, read_decoder, read_windows, rope_of_layers
from headrace.models.family import Family, Preset, Row, Table, attention, embedding, head, mlp, norm

_WITH_TOWER = "gemma3"
_DEFAULTS: Mapping[str, Any] = {
    "attn_logit_softcapping": None,
    "attention_bias": False,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
    "vocab_size": 262208,
}
"""Published configs leave out what they share."""
_FIXED = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def read(raw: Mapping[str, Any]) -> Architecture:
    """The decoder's values are in text_config, or alone in a model of text."""
    text = {**_DEFAULTS, **raw, **raw.get("text_config", {}), "model_type": raw["model_type"]}
    for name in (*_FIXED, "hidden_activation"):
        if text[name] != _DEFAULTS[name] and text[name]:
            raise ConfigError(f"{name} {text[name]!r} is not supported: published models have {_DEFAULTS[name]!r}")
    full = rope_of_layers(text, "full_attention")
    within = rope_of_layers({**text, "rope_theta": text["rope_local_base_freq"]}, "sliding_attention")
    if within.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type {within['rope_type']!r} of sliding_attention is not supported: it is plain")
    return read_decoder(
        text,
        swiglu=False,
        scaled_embeddings=True,
        softmax_scale=text["query_pre_attn_scalar"] ** -0.5,
        qk_layernorm=True,
        post_norms=True,
        layernorm_zero_centered_gamma=True,
        rotary_base=float(full["rope_theta"]),
        rope_scaling=linear_rope({"rope_parameters": full}),
        windows=read_windows(text, text.get("sliding_window_pattern") or 6, float(within["rope_theta"])),
        kept=("vision_tower.", "multi_modal_projector.") if raw["model_type"] == _WITH_TOWER else (),
    )


def table(a: Architecture) -> Table:
    name = "language_model.model" if a.family == _WITH_TOWER else "model"

    def layer(number: int) -> Sequence[Row]:
        hf = f"{name}.layers.{number}"
        return [
            norm("input_layernorm", f"{hf}.input_layernorm", a.hidden_size),
            *attention(a, hf),
            norm("self_attention.post_norm", f"{hf}.post_attention_layernorm", a.hidden_size),
            norm("pre_mlp_layernorm", f"{hf}.pre_feedforward_layernorm", a.hidden_size),
            *mlp(a, "mlp", f"{hf}.mlp", a.ffn_hidden_size),
            norm("mlp.post_norm", f"{hf}.post_feedforward_layernorm", a.hidden_size),
        ]

    return Table(embedding(a, name), layer, head(a, name), a.num_layers)


def _text(hidden: int, mlp: int, layers: int) -> dict[str, Any]:
    """A model of text alone."""
    return {
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "vocab_size": 262144,
    }


def _config(hidden: int, mlp: int, layers: int, **heads: int) -> dict[str, Any]:
    """A model that reads images too."""
    text = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        **heads,
    }
    return {"model_type": _WITH_TOWER, "text_config": text}


_12B = _config(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8)
_27B = _config(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168)
_TP8_PP2 = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}

FAMILY = Family(
    model_types=("gemma3", "gemma3_text"),
    read=read,
    table=table,
    presets=(
        Preset("gemma-3-270m", _text(640, 2048, 18), 0.268e9, {}),
        Preset("gemma-3-1b", _text(1152, 6912, 26), 1e9, {}),
        Preset("gemma-3-4b", _config(2560, 10240, 34), 3.88e9, {"tensor_model_parallel_size": 2}),
        Preset("gemma-3-12b", _12B, 11.77e9, {"tensor_model_parallel_size": 4}),
        Preset("gemma-3-27b", _27B, 27.01e9, _TP8_PP2),
    ),
)
