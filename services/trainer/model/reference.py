"""A frozen policy (the reference, a teacher): other weights that take the model's place for a forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.model.host_copy import HostCopy
from services.trainer.model.lora.policy_weights import PolicyWeights


class ReferencePolicy:
    """A host copy of a Hugging Face folder's weights, or of the initial ones; with LoRA of the adapters alone."""

    def __init__(self, weights: PolicyWeights, folder: Path | None) -> None:
        if folder is None:
            self._shards = weights.changing_shards
            self._copy = HostCopy(weights.changing)
            return
        current = HostCopy(weights.named)
        weights.become(folder)
        self._shards = weights.shards
        self._copy = HostCopy(weights.named)
        current.put()

    def in_place(self) -> AbstractContextManager[None]:
        """The model is the reference policy inside the block, and itself again after it."""
        return self._copy.in_place()

    def update(self) -> None:
        """Makes the current policy the reference from here on."""
        self._copy.take()

    def shards(self) -> list[ModelShard]:
        """Its weights in the model's places, for a checkpoint."""
        return self._copy.shards(self._shards)
