"""The floating-point operations that a model needs, by formula: two for each multiplication of its matrix products.

Attention counts the pairs of a token and those it sees, so causal attention is half a square. Norms, activations,
rotations, softmax and routing are left out: they are less than a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.config.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Of a forward pass; a backward pass needs twice as many."""

    per_token: int
    """Of all layers but for attention's products."""
    per_pair: int
    """Of a token and one that it sees: its score and its weighted value, in all layers and heads."""
    per_projection: int
    """Of a token whose successor is predicted: the output layer."""

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFlops:
        """From the architecture alone."""
        a = architecture
        qkv_and_out = a.hidden_size * a.kv_channels * (2 * a.num_attention_heads + 2 * a.num_query_groups)
        layer = qkv_and_out + 3 * a.hidden_size * a.ffn_hidden_size
        return cls(
            per_token=2 * a.num_layers * layer,
            per_pair=2 * a.num_layers * a.num_attention_heads * 2 * a.kv_channels,
            per_projection=2 * a.hidden_size * a.vocab_size,
        )

    def forward(self, tokens: int, pairs: int, projections: int) -> int:
        """Of so many of each."""
        return tokens * self.per_token + pairs * self.per_pair + projections * self.per_projection

    def training(self, samples: Iterable[tuple[int, int]]) -> int:
        """Forward and backward of whole samples: (tokens, response tokens) of each."""
        return 3 * sum(
            self.forward(tokens, tokens * (tokens + 1) // 2, response_tokens) for tokens, response_tokens in samples
        )
