"""Gemma 3: norms before and behind attention and MLP, windows in five layers of six, scaled embeddings, gated GELU.

The models from 4B on read images too. Their decoder is trained, on text, and what reads images is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture, linear_rope, read_decoder, read_windows, rope_of_layers
from headrace.models.family import Family, Row, Table, attention, embedding, head, mlp, norm

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


FAMILY = Family(model_types=("gemma3", "gemma3_text"), read=read, table=table)
