"""Multi-head latent attention where Megatron-core's own parts fall short of the published models."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

_EPSILON = 1e-6


class LatentNorm(WrappedTorchNorm):  # type: ignore[misc]  # untyped base
    """The published models' norms of the latents have an epsilon of their own, whatever rms_norm_eps says."""

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        return WrappedTorchNorm(config, hidden_size, _EPSILON)


def with_latent_norms(layer: ModuleSpec) -> ModuleSpec:
    """The spec of a local layer with these norms; Transformer Engine fuses its own into the projections."""
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.kv_layernorm = LatentNorm
    return layer
