"""GLM-4 and GLM-Z1 (0414): norms behind attention and MLP too, half of each head turned, in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.architecture import Architecture, read_decoder, rotary_percent
from headrace.models.family import Family, FusedGateUp, Preset, Row, Split, Table, attention, embedding, head, norm, one


def read(raw: Mapping[str, Any]) -> Architecture:
    return read_decoder(raw, post_norms=True, rotary_interleaved=True, rotary_percent=rotary_percent(raw, 0.5))


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


def _config(hidden: int, mlp: int, layers: int, heads: int, bias: bool) -> dict[str, Any]:
    return {
        "model_type": "glm4",
        "attention_bias": bias,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
    }


_9B = _config(4096, 13696, 40, 32, bias=True)
_32B = _config(6144, 23040, 61, 48, bias=False)
_TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
# 61 layers: seven stages of eight and one of five.
_TP2_PP8 = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 8,
    "num_layers_in_last_pipeline_stage": 5,
}

FAMILY = Family(
    model_types=("glm4",),
    read=read,
    table=table,
    presets=(
        Preset("glm-4-9B-0414", _9B, 9.4e9, _TP2_PP2),
        Preset("glm-z1-9B", _9B, 9.4e9, _TP2_PP2),
        Preset("glm-4-32B-0414", _32B, 32.6e9, _TP2_PP8),
        Preset("glm-z1-32B", _32B, 32.6e9, _TP2_PP8),
    ),
)
