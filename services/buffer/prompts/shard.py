"""One shard's part of a walk: of all prompts in their order, those whose number is `shard` modulo `num_shards`.

Every shard walks the whole source and keeps its own, so together they walk it exactly once, shuffled or mixed as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.prompts.mix import MixReading, PromptMix
from services.buffer.source import Cursor


class PromptShard(PromptMix):
    """`prompts_read` in its cursors counts every shard's prompts."""

    def __init__(self, whole: PromptMix, shard: int, num_shards: int) -> None:
        self._whole = whole
        self._shard = shard
        self._num_shards = num_shards

    @property
    def digests(self) -> tuple[str, ...]:
        return self._whole.digests

    @property
    def bad_lines(self) -> int:
        return self._whole.bad_lines

    def start(self) -> tuple[Cursor, ...]:
        return self._whole.start()

    async def read(self, cursors: Sequence[Cursor], count: int) -> MixReading:
        """Reads to the `count`-th prompt of this shard and no further."""
        first = sum(cursor.prompts_read for cursor in cursors)
        skip = (self._shard - first) % self._num_shards
        reading = await self._whole.read(cursors, skip + (count - 1) * self._num_shards + 1)
        own = reading.prompts[skip :: self._num_shards]
        return MixReading(own, reading.cursors, reading.exhausted)

    async def close(self) -> None:
        await self._whole.close()
