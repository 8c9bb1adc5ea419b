"""How one Megatron parameter is made of Hugging Face tensors, and how tensor parallelism cuts it.

Each kind turns whole Hugging Face tensors into this rank's shard (`shard`), and all ranks' shards back into the whole
tensors (`merge`). Shapes: out × in for weights; a bias has no `in`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sharding(Protocol):
    """Both directions for one Megatron parameter."""

    def shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Hugging Face tensors, in the table's order → this rank's parameter."""

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """All ranks' parameters, in rank order → the Hugging Face tensors."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every rank: norms."""

    def shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return parts[0]

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along one dimension: 0 for column-parallel layers and embeddings, 1 for row-parallel layers."""

    dim: int

    def shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return parts[0].chunk(size, dim=self.dim)[rank]

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), dim=self.dim)]


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate and up, each cut along its rows; a rank holds its gate rows, then its up rows."""

    def shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in range(2)]


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """q, k and v interleaved by query group: each group's query heads, its key head, its value head."""

    num_query_groups: int
    heads_per_group: int
    head_size: int

    def shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        q, k, v = (
            part.reshape(self.num_query_groups, heads * self.head_size, *part.shape[1:])
            for part, heads in zip(parts, (self.heads_per_group, 1, 1), strict=True)
        )
        return torch.cat([q, k, v], dim=1).chunk(size)[rank].flatten(0, 1)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(shards))
        grouped = whole.reshape(self.num_query_groups, -1, *whole.shape[1:])
        sizes = [self.heads_per_group * self.head_size, self.head_size, self.head_size]
        return [part.flatten(0, 1) for part in torch.split(grouped, sizes, dim=1)]
