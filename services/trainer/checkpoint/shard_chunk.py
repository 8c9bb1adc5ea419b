"""Shard chunks of a checkpoint: runs of elements of tensors that all ranks together hold.

A tensor of the whole model is cut into `num_shards` by tensor parallelism, in the way its `Sharding` says; a shard is
laid flat, and a rank of the distributed optimizer holds a run of it. So a chunk has whole-tensor coordinates: the
tensor's name, which shard of how many, and where in it the run begins. Any layout can be put together from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardChunk:
    """The elements of one shard of a tensor from `start` on."""

    tensor: str
    values: Tensor
    """[n], the elements laid flat"""
    shape: tuple[int, ...]
    """The shape of the whole shard."""
    shard: int = 0
    num_shards: int = 1
    start: int = 0
    split_dim: int = 0
    """The dimension that the shards divide."""

    @classmethod
    def whole(cls, tensor: str, values: Tensor, *, shard: int = 0, num_shards: int = 1) -> ShardChunk:
        """All of a shard."""
        return cls(tensor, values.detach().reshape(-1), tuple(values.shape), shard, num_shards)

    @property
    def key(self) -> str:
        """Its name in a file; unique over all ranks."""
        return f"{self.tensor}@{self.shard}.{self.start}"

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of all shards together: the same under every layout."""
        return whole_shape(self.shape, self.num_shards, self.split_dim)


@dataclass(frozen=True, slots=True)
class Place:
    """The manifest's entry for a chunk: which file it is in, and which part of which tensor it is."""

    tensor: str
    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole shard."""
    whole_shape: tuple[int, ...]
    """The shape of all shards together."""
    shard: int
    num_shards: int
    start: int
    end: int

    @classmethod
    def of(cls, chunk: ShardChunk, file: str) -> Place:
        """The place of a chunk that is written to `file`."""
        return cls(
            tensor=chunk.tensor,
            file=file,
            key=chunk.key,
            dtype=str(chunk.values.dtype).removeprefix("torch."),
            shape=chunk.shape,
            whole_shape=chunk.whole_shape,
            shard=chunk.shard,
            num_shards=chunk.num_shards,
            start=chunk.start,
            end=chunk.start + chunk.values.numel(),
        )

    @property
    def shard_elements(self) -> int:
        """The number of elements in the whole shard."""
        return math.prod(self.shape)


def whole_shape(shape: Sequence[int], num_shards: int, split_dim: int) -> tuple[int, ...]:
    """The shape of `num_shards` shards of that shape, side by side."""
    if num_shards == 1:
        return tuple(shape)
    return tuple(size * num_shards if dim == split_dim else size for dim, size in enumerate(shape))
