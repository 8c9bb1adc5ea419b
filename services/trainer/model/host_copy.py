"""A rank's weights as a copy in the host's memory, to take the model's place for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from services.trainer.hugging_face.model_shard import ModelShard


class HostCopy:
    """A copy of everything in `weights` at the moment it is made, or taken again."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._values = {name: _copied(weight) for name, weight in weights.items()}

    def take(self) -> None:
        """Copies the weights that are in place now."""
        for name, weight in self._weights.items():
            self._values[name].copy_(weight.detach())

    def put(self) -> None:
        """Copies the weights into the model, for good."""
        with torch.no_grad():
            for name, value in self._values.items():
                self._weights[name].copy_(value)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights inside the block, and its own again after it."""
        current = HostCopy(self._weights)
        self.put()
        try:
            yield
        finally:
            current.put()

    def shards(self, shards: Sequence[ModelShard]) -> list[ModelShard]:
        """The model's places in a checkpoint, with this copy's values."""
        names = {id(weight): name for name, weight in self._weights.items()}
        return [replace(shard, parameter=self._values[names[id(shard.parameter)]]) for shard in shards]


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", copy=True)
