"""This rank's parameters as shards of a whole model: cutting whole tensors, and putting shards together again.

Both directions of every kind of sharding that a table names (headrace.models.family).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.models.family import (
    FusedGateUp,
    GateUp,
    QueryKeyValue,
    Replicated,
    Sections,
    Sharding,
    Split,
    Transposed,
    TransposedGateUp,
)


def split_dim(sharding: Sharding) -> int:
    """The dimension of a parameter that tensor ranks divide."""
    return 1 if isinstance(sharding, Transposed) else sharding.dim if isinstance(sharding, Split) else 0


def whole_shape(shape: Sequence[int], num_shards: int, split_dim: int) -> tuple[int, ...]:
    return tuple(size * num_shards if dim == split_dim else size for dim, size in enumerate(shape))


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
        case QueryKeyValue(groups, heads_per_group, head_size, has_gates):
            query, *others = (part.reshape(groups, -1, *part.shape[1:]) for part in parts)
            if has_gates:
                query = _swapped(query, heads_per_group, 2, head_size)
            return torch.cat([query, *others], dim=1).chunk(size)[rank].flatten(0, 1)
        case Sections(sizes, times):
            sections = [
                section.flatten(0, 1)
                for part, rows in zip(parts, sizes, strict=True)
                for section in part.unflatten(0, (times, -1)).split([each // times for each in rows], dim=1)
            ]
            return torch.cat([section.chunk(size)[rank] for section in sections])
        case Transposed():
            return parts[0].t().chunk(size, dim=1)[rank]
        case TransposedGateUp():
            rows = parts[0].t()
            return cut(GateUp(), [rows[::2], rows[1::2]], rank, size)


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
        case QueryKeyValue(groups, heads_per_group, head_size, has_gates):
            whole = torch.cat(list(shards))
            grouped = whole.reshape(groups, -1, *whole.shape[1:])
            query, *others = grouped.split([heads_per_group * head_size * (1 + has_gates), head_size, head_size], dim=1)
            if has_gates:
                query = _swapped(query, 2, heads_per_group, head_size)
            return [part.flatten(0, 1) for part in (query, *others)]
        case Sections(sizes, times):
            cut_sizes = [rows // len(shards) for each in sizes for rows in each]
            pieces = zip(*(shard.split(cut_sizes) for shard in shards), strict=True)
            wholes = (torch.cat(piece).unflatten(0, (times, -1)) for piece in pieces)
            return [torch.cat([next(wholes) for _ in each], dim=1).flatten(0, 1) for each in sizes]
        case Transposed():
            return [torch.cat(list(shards), dim=1).t()]
        case TransposedGateUp():
            return [torch.stack(merge(GateUp(), shards), dim=1).flatten(0, 1).t()]


def _swapped(query: Tensor, outer: int, inner: int, head_size: int) -> Tensor:
    """[groups, outer * inner * head_size, …], inner before outer: a gate behind each query head, or behind all."""
    heads: Tensor = query.unflatten(1, (outer, inner, head_size))
    return heads.transpose(1, 2).flatten(1, 3)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One of `num_shards` shards of the tensor `key`, held alike by `num_replicas` ranks."""

    key: str
    """Names the tensor in the whole model, whatever the layout: the first Hugging Face tensor that it is made of."""
    parameter: Tensor
    sharding: Sharding
    shard: int
    num_shards: int
    replica: int
    num_replicas: int
    is_reporting: bool
    """False on ranks that hold what another tensor rank or stage holds too: norms, the copy of a tied embedding."""

    @classmethod
    def of(
        cls, key: str, parameter: Tensor, sharding: Sharding, *, rank: int, size: int, data_rank: int, data_size: int
    ) -> ModelShard:
        """The shard of a rank among `size` tensor ranks and `data_size` data ranks; all hold what is not cut."""
        if isinstance(sharding, Replicated):
            replica = data_rank * size + rank
            return cls(key, parameter, sharding, 0, 1, replica, data_size * size, is_reporting=rank == 0)
        return cls(key, parameter, sharding, rank, size, data_rank, data_size, is_reporting=True)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return whole_shape(self.parameter.shape, self.num_shards, split_dim(self.sharding))


_ROUTER_BIAS = ".router.expert_bias"


def weights_of(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A rank's weights as a checkpoint, an export or another policy holds them.

    The keys are Megatron's names behind the number of the stage: `0.decoder.layers.3.mlp.linear_fc1.weight`.
    """
    return {
        f"{number}.{name}": tensor for number, chunk in enumerate(chunks) for name, tensor in _of_one(chunk).items()
    }


def _of_one(chunk: nn.Module) -> dict[str, Tensor]:
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(_ROUTER_BIAS)}
    return dict(chunk.named_parameters()) | biases
