"""Transformer Engine fuses a norm into the linear layer behind it, and experts into one module, under other names."""

from __future__ import annotations

import re

_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def fused_name(megatron_name: str) -> str:
    """The name in a Transformer Engine layer; most stay."""
    for plain, fused in _FUSED.items():
        if megatron_name.endswith("." + plain):
            return megatron_name.removesuffix(plain) + fused
    return _EXPERT.sub(r".\2.weight\1", megatron_name)
