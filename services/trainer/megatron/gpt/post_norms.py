"""Attention and MLP with a norm behind them, before the residual is added (GLM-4)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

Output = tuple[Tensor, Tensor | None]


class _PostNorm:
    """A base before a Megatron module: its output goes through `post_norm`, and no bias comes behind that."""

    norm: ClassVar[Any]
    config: Any
    """Every Megatron module has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.post_norm = type(self).norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """The wrapped module's output, normalized."""
        output, bias = super().forward(*args, **kwargs)  # type: ignore[misc]  # the Megatron module has it
        return self.post_norm(output), bias


class NormedSelfAttention(_PostNorm, SelfAttention):
    """Self-attention, then the norm."""


class NormedMLP(_PostNorm, MLP):
    """MLP, then the norm."""


def with_post_norms(layer: ModuleSpec, norm: type) -> ModuleSpec:
    """The layer's spec, its attention and MLP exchanged for normed ones."""
    submodules = layer.submodules
    attention, mlp = submodules.self_attention, submodules.mlp
    normed = type("NormedSelfAttention", (NormedSelfAttention,), {"norm": norm})
    submodules.self_attention = ModuleSpec(normed, attention.params, attention.submodules)
    normed_mlp: Any = type("NormedMLP", (NormedMLP,), {"norm": norm})
    # Megatron-core 0.19 builds an MLP through a classmethod, 0.16 from a spec.
    if isinstance(mlp, partial):
        submodules.mlp = partial(normed_mlp.as_mlp_submodule, **mlp.keywords)
    else:
        submodules.mlp = ModuleSpec(normed_mlp, mlp.params, mlp.submodules)
    return layer
