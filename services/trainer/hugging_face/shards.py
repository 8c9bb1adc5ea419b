"""Cutting whole Hugging Face tensors into this rank's parameter, and putting all ranks' shards together again.

Both directions of every kind of sharding that a table names (headrace.models.rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.models.rows import FusedGateUp, GateUp, QueryKeyValue, Replicated, Sharding, Split


def split_dim(sharding: Sharding) -> int:
    """The dimension of a parameter that tensor ranks divide."""
    return sharding.dim if isinstance(sharding, Split) else 0


def cut(sharding: Sharding, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Hugging Face tensors, in the table's order → this rank's parameter."""
    match sharding:
        case Replicated():
            return parts[0]
        case Split(dim):
            return parts[0].chunk(size, dim=dim)[rank]
        case GateUp():
            return torch.cat([part.chunk(size)[rank] for part in parts])
        case FusedGateUp():
            return torch.cat([half.chunk(size)[rank] for half in parts[0].chunk(2)])
        case QueryKeyValue(groups, heads_per_group, head_size):
            grouped = [
                part.reshape(groups, heads * head_size, *part.shape[1:])
                for part, heads in zip(parts, (heads_per_group, 1, 1), strict=True)
            ]
            return torch.cat(grouped, dim=1).chunk(size)[rank].flatten(0, 1)


def merge(sharding: Sharding, shards: Sequence[Tensor]) -> list[Tensor]:
    """All ranks' parameters, in rank order → the Hugging Face tensors."""
    match sharding:
        case Replicated():
            return [shards[0]]
        case Split(dim):
            return [torch.cat(list(shards), dim=dim)]
        case GateUp():
            halves = [one.chunk(2) for one in shards]
            return [torch.cat([half[part] for half in halves]) for part in range(2)]
        case FusedGateUp():
            return [torch.cat(merge(GateUp(), shards))]
        case QueryKeyValue(groups, heads_per_group, head_size):
            whole = torch.cat(list(shards))
            grouped = whole.reshape(groups, -1, *whole.shape[1:])
            sizes = [heads_per_group * head_size, head_size, head_size]
            return [part.flatten(0, 1) for part in torch.split(grouped, sizes, dim=1)]
