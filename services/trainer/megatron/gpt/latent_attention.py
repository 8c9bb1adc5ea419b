"""Multi-head latent attention where Megatron-core's own parts fall short of the published models."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from headrace.models.architecture import LatentAttention
from services.trainer.megatron.gpt.norms import MarkedNorm

_EPSILON = 1e-6


class LatentNorm(MarkedNorm):
    """The published models' norms of the latents have an epsilon of their own, whatever rms_norm_eps says."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = _EPSILON, **_: object) -> Any:
        return MarkedNorm(config, hidden_size, _EPSILON)


class PlainQueries(MLASelfAttention):
    """Queries without a latent have no norm, which Megatron-core 0.19 would fuse into their projection."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return super()._resolve_qk_norm_config(submodules) | {"linear_q_proj": submodules.linear_q_proj}


def with_latent_attention(layer: ModuleSpec, latent: LatentAttention, *, with_te: bool) -> ModuleSpec:
    """The layer's spec with these parts; Transformer Engine's norms are fused into the projections."""
    attention = layer.submodules.self_attention
    if latent.q_lora_rank is None:
        layer.submodules.self_attention = ModuleSpec(PlainQueries, attention.params, attention.submodules)
    if not with_te:
        attention.submodules.kv_layernorm = LatentNorm
        attention.submodules.q_layernorm = IdentityOp if latent.q_lora_rank is None else LatentNorm
    return layer
