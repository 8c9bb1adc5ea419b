"""Policies that engines served and samples may still come from, as host copies by policy version.

A version is remembered when its weights are published: before the step that follows. It is let go when no sample that
the ledger still admits can be so old. Saved with the checkpoint: a resumed run gets the same old samples again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from services.trainer.checkpoint.model_state import ModelState
from services.trainer.checkpoint.reader import CheckpointReader
from services.trainer.checkpoint.shard_chunk import ShardChunk
from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.model.host_copy import HostCopy

_PART = "old-"


class OldPolicies:
    """`capacity` published versions at most, the newest among them."""

    def __init__(
        self, weights: Mapping[str, Tensor], shards: Sequence[ModelShard], *, capacity: int, publish_interval: int
    ) -> None:
        self._weights = weights
        self._shards = shards
        self._capacity = capacity
        self._publish_interval = publish_interval
        self._was_asked = False
        self._copies: dict[int, HostCopy] = {}

    @property
    def versions(self) -> list[int]:
        """Oldest first; the same on every rank."""
        return sorted(self._copies)

    def remember(self, step: int) -> None:
        """Called before a step: keeps the weights if they were just published, or if the trainer just started."""
        if step % self._publish_interval and self._was_asked:
            return
        self._was_asked = True
        self._copies[step] = HostCopy(self._weights)
        for version in self.versions[: -self._capacity]:
            del self._copies[version]

    def nearest(self, version: int) -> int:
        """The newest kept version that is not newer, else the oldest."""
        return max((kept for kept in self.versions if kept <= version), default=self.versions[0])

    def in_place(self, version: int) -> AbstractContextManager[None]:
        """The model is that policy inside the block."""
        return self._copies[version].in_place()

    def chunks(self) -> Iterator[ShardChunk]:
        """The kept versions as chunks of a checkpoint."""
        for version, copy in self._copies.items():
            yield from self._state(version, copy).chunks()

    def scalars(self) -> Mapping[str, Any]:
        """There are none: versions are in the chunks' names."""
        return {}

    def restore(self, reader: CheckpointReader) -> None:
        """Keeps the versions that the checkpoint has, and no others."""
        versions = {int(found[1]) for name in reader.names if (found := re.match(rf"{_PART}(\d+)/", name))}
        self._copies = {version: HostCopy(self._weights) for version in sorted(versions)}
        for version, copy in self._copies.items():
            self._state(version, copy).restore(reader)

    def _state(self, version: int, copy: HostCopy) -> ModelState:
        return ModelState(f"{_PART}{version}", copy.shards(self._shards), None)
