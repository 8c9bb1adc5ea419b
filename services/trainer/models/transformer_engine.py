"""Transformer Engine fuses a norm into the linear layer behind it, under another name."""

from __future__ import annotations

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def fused_name(megatron_name: str) -> str:
    """The name in a Transformer Engine layer; most stay."""
    for plain, fused in _FUSED_NORMS.items():
        if megatron_name.endswith("." + plain):
            return megatron_name.removesuffix(plain) + fused
    return megatron_name
