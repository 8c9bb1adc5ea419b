"""GLM-4 and GLM-Z1 (0414): norms behind attention and MLP too, half of each head turned, in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.architecture import Architecture
from headrace.models.blocks import attention, embedding, head, norm, one
from headrace.models.family import Family, Preset
from headrace.models.reading import read_decoder, rotary_percent
from headrace.models.rows import FusedGateUp, Row, Split, Table


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, post_norms=True, rotary_interleaved=True, rotary_percent=rotary_percent(raw))


def table(a: Architecture) -> Table:
    """Gate and up are one tensor. The two post norms come on top of what others call post_attention_layernorm."""

    def layer(number: int) -> Sequence[Row]:
        hf, width = f"model.layers.{number}", a.ffn_hidden_size
        gate_up, down = (2 * width, a.hidden_size), (a.hidden_size, width)
        return [
            norm("input_layernorm", f"{hf}.input_layernorm", a.hidden_size),
            *attention(a, hf),
            norm("self_attention.post_norm", f"{hf}.post_self_attn_layernorm", a.hidden_size),
            norm("pre_mlp_layernorm", f"{hf}.post_attention_layernorm", a.hidden_size),
            one("mlp.linear_fc1.weight", f"{hf}.mlp.gate_up_proj.weight", gate_up, FusedGateUp()),
            one("mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", down, Split(1)),
            norm("mlp.post_norm", f"{hf}.post_mlp_layernorm", a.hidden_size),
        ]

    return Table(embedding(a), layer, head(a), a.num_layers)


FAMILY = Family(
    model_types=("glm4",),
    read=read,
    table=table,
    presets=(
        Preset(
            "glm-z1-9B",
            {
                "model_type": "glm4",
                "attention_bias": True,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 13696,
                "max_position_embeddings": 32768,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "partial_rotary_factor": 0.5,
                "rms_norm_eps": 1e-05,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "vocab_size": 151552,
            },
            9.4e9,
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        ),
    ),
)
