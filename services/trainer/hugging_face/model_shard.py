"""A parameter of this rank, with its place in the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.models.rows import Sharding


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
    speaks: bool
    """False on ranks that hold what another tensor rank or stage holds too: norms, the copy of a tied embedding."""

    @property
    def is_copy(self) -> bool:
        """True for a tied embedding's copy on the last stage: another shard is saved in its place."""
        return self.num_replicas == 0
