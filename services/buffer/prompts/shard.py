"""One shard's part of a source: of all its prompts in their order, those whose number is `shard` modulo `num_shards`.

Every shard reads the whole source and returns its own prompts, so together they read each exactly once.
"""

from __future__ import annotations

from services.buffer.ledger.source import Cursor
from services.buffer.prompts.reader import PromptReader, Reading


class ReaderShard:
    """`prompts_read` in its cursors counts every shard's prompts."""

    def __init__(self, whole: PromptReader, shard: int, num_shards: int) -> None:
        self._whole = whole
        self._shard = shard
        self._num_shards = num_shards
        self.digest = whole.digest
        self.bad_lines = whole.bad_lines

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """Reads to the `count`-th prompt of this shard and no further."""
        skip = (self._shard - cursor.prompts_read) % self._num_shards
        reading = await self._whole.read(cursor, skip + (count - 1) * self._num_shards + 1)
        return Reading(reading.entries[skip :: self._num_shards], reading.cursor)

    def is_end(self, cursor: Cursor) -> bool:
        """True at the end of the whole source."""
        return self._whole.is_end(cursor)

    async def close(self) -> None:
        await self._whole.close()
