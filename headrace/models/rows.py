"""The rows of a table: for each Megatron parameter its Hugging Face tensors, and how tensor parallelism divides it.

Shapes are out × in for weights; a bias has no `in`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every tensor rank: norms, routers."""


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along one dimension: 0 for column-parallel layers and embeddings, 1 for row-parallel layers."""

    dim: int


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate and up, each cut along its rows; a rank holds its gate rows, then its up rows."""


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """Divided like GateUp; one tensor has all gate rows and then all up rows."""


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """q, k and v interleaved by query group: each group's query heads, its key head, its value head."""

    num_query_groups: int
    heads_per_group: int
    head_size: int


Sharding = Replicated | Split | GateUp | FusedGateUp | QueryKeyValue


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """`megatron` is made of `hf`, in this order. In a layer's rows `megatron` begins below the layer."""

    megatron: str
    hf: tuple[HfTensor, ...]
    sharding: Sharding
    expert: int | None = None
    """The expert that it is a part of; its Megatron name then has {expert}, counted within the rank."""


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of a model, in the order in which tensors travel."""

    first: Sequence[Row]
    """The first stage's rows: the embedding."""
    layer: Callable[[int], Sequence[Row]]
    """A layer's rows; layers are counted from 0 over the whole model."""
    last: Sequence[Row]
    """The last stage's rows: final norm and output layer."""
    num_layers: int

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the first stage, of each layer, and of the last stage."""
        yield from self.first
        for layer in range(self.num_layers):
            yield from self.layer(layer)
        yield from self.last

    def tensors(self) -> Iterator[HfTensor]:
        """The tensors of the Hugging Face checkpoint."""
        for row in self.rows():
            yield from row.hf

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors())
