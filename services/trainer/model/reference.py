"""A frozen policy (the reference, a teacher): other weights that take the model's place for a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.model.host_copy import HostCopy


class ReferencePolicy:
    """A host copy of a Hugging Face folder's weights, or of the initial ones."""

    def __init__(self, weights: Mapping[str, Tensor], converter: Converter, folder: Path | None) -> None:
        if folder is None:
            self._copy = HostCopy(weights)
            return
        current = HostCopy(weights)
        converter.load(folder)
        self._copy = HostCopy(weights)
        current.put()

    def in_place(self) -> AbstractContextManager[None]:
        """The model is the reference policy inside the block, and itself again after it."""
        return self._copy.in_place()

    def update(self) -> None:
        """Makes the current policy the reference from here on."""
        self._copy.take()

    def shards(self, shards: Sequence[ModelShard]) -> list[ModelShard]:
        """Its weights in the model's places, for a checkpoint."""
        return self._copy.shards(shards)
