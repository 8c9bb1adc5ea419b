"""Attention and MLP with a norm behind them, before the residual is added (GLM-4)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

Output = tuple[Tensor, Tensor | None]


class NormedSelfAttention(SelfAttention):  # type: ignore[misc]  # untyped base
    """Self-attention, then `post_norm`."""

    def __init__(self, *args: Any, post_norm: type, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.post_norm = build_module(post_norm, config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """As SelfAttention; there is no bias to come behind the norm."""
        output, bias = super().forward(*args, **kwargs)
        return self.post_norm(output), bias


class NormedMLP(MLP):  # type: ignore[misc]  # untyped base
    """MLP, then `post_norm`."""

    def __init__(self, *args: Any, post_norm: type, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.post_norm = build_module(post_norm, config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """As MLP; there is no bias to come behind the norm."""
        output, bias = super().forward(*args, **kwargs)
        return self.post_norm(output), bias


def with_post_norms(layer: ModuleSpec, norm: type) -> ModuleSpec:
    """The layer's spec, its attention and MLP exchanged for normed ones."""
    submodules: TransformerLayerSubmodules = layer.submodules
    for place, module in (("self_attention", NormedSelfAttention), ("mlp", NormedMLP)):
        plain: ModuleSpec = getattr(submodules, place)
        setattr(submodules, place, ModuleSpec(module, plain.params | {"post_norm": norm}, plain.submodules))
    return layer
