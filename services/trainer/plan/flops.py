"""The floating-point operations that a model needs, by formula: two for each multiplication of its matrix products.

Attention counts the pairs of a token and those it sees, so causal attention is half a square. Norms, activations,
rotations, softmax and routing are left out: they are less than a hundredth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.models.architecture import Architecture
from headrace.models.registry import table


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The operations of a forward pass; a backward pass needs twice as many."""

    per_token: int
    """Operations of a token in all layers, without attention's products."""
    per_pair: int
    """Operations of a token with one that it sees: its score and its weighted value, in all layers and heads."""
    per_projection: int
    """Operations of the output layer for a token whose successor is predicted."""

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFlops:
        """Counted from the architecture alone."""
        a, mla = architecture, architecture.latent_attention
        head = a.kv_channels * 2 if mla is None else mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim
        return cls(
            per_token=2 * _multiplications(a),
            per_pair=2 * a.num_layers * a.num_attention_heads * head,
            per_projection=2 * a.hidden_size * a.vocab_size,
        )

    def forward(self, tokens: int, pairs: int, projections: int) -> int:
        """The operations of a forward pass over that many tokens, pairs and predictions."""
        return tokens * self.per_token + pairs * self.per_pair + projections * self.per_projection

    def training(self, samples: Iterable[tuple[int, int]]) -> int:
        """Forward and backward of whole samples: (tokens, response tokens) of each."""
        return 3 * sum(
            self.forward(tokens, tokens * (tokens + 1) // 2, response_tokens) for tokens, response_tokens in samples
        )


def _multiplications(architecture: Architecture) -> int:
    """Multiplications of a token with the matrices of all layers, of experts only its own."""
    layers = table(architecture)
    shared = of_experts = 0
    for row in (row for layer in range(architecture.num_layers) for row in layers.layer(layer)):
        size = sum(math.prod(tensor.shape) for tensor in row.hf if len(tensor.shape) > 1)
        if row.expert is None:
            shared += size
        else:
            of_experts += size
    experts = architecture.experts
    return shared + (of_experts * experts.topk // experts.count if experts else 0)
