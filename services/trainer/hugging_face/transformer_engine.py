"""Transformer Engine fuses a norm into the linear layer behind it, and experts into one module, under other names."""

from __future__ import annotations

import re

from headrace.models.torch_dist.keys import FUSED_NORMS

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def fused_name(megatron_name: str) -> str:
    """The name in a Transformer Engine layer; most stay."""
    for plain, fused in FUSED_NORMS.items():
        if megatron_name.endswith("." + plain):
            return megatron_name.removesuffix(plain) + fused
    return _EXPERT.sub(r".\2.weight\1", megatron_name)
