"""The states of this rank's random number generators, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.trainer.checkpoint.reader import CheckpointReader
from services.trainer.checkpoint.shard_chunk import ShardChunk

PREFIX = "random/"


class RandomState:
    """A rank that was not there when the checkpoint was written goes on with rank 0's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def chunks(self) -> Iterator[ShardChunk]:
        """The CPU's, and the GPU's where there is one."""
        yield ShardChunk.whole(f"{PREFIX}cpu/{self._rank}", torch.get_rng_state())
        if torch.cuda.is_available():
            yield ShardChunk.whole(f"{PREFIX}cuda/{self._rank}", torch.cuda.get_rng_state())

    def restore(self, reader: CheckpointReader) -> None:
        """Takes up what is there for this kind of device."""
        if (name := self._name(reader, "cpu")) is not None:
            torch.set_rng_state(reader.whole(name))
        if torch.cuda.is_available() and (name := self._name(reader, "cuda")) is not None:
            torch.cuda.set_rng_state(reader.whole(name))

    def _name(self, reader: CheckpointReader, device: str) -> str | None:
        names = [f"{PREFIX}{device}/{rank}" for rank in (self._rank, 0)]
        return next((name for name in names if reader.has(name)), None)
