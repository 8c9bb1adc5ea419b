"""Torch's norms in layers without Transformer Engine, with what sequence parallelism needs of them.

Megatron-core's own wrapper refuses sequence parallelism, because nothing adds up the gradients of a norm's weight over
the ranks that each saw a stretch of the sequence. It is enough to mark the weight: finalize_model_grads does it then.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from services.trainer.megatron.gpt.spec_parts import with_parts
from services.trainer.megatron.marks import mark_sequence_parallel


class MarkedNorm:
    """Makes the norm of a spec: RMSNorm, or LayerNorm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            mark_sequence_parallel(parameter, config.sequence_parallel)
        return norm


def with_marked_norms(spec: Any) -> Any:
    """The spec of a layer or a block with these in the place of Megatron's."""
    return with_parts(spec, lambda _, part: MarkedNorm if part is WrappedTorchNorm else part)
