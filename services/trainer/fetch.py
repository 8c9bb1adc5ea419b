"""A rank's own samples, from the buffer, asked for by the compute thread and carried by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.client.port import Buffer
from headrace.trajectory import Sample

_SECONDS = 600.0


class Fetch:
    """`fetch(sample_ids)` gives the samples in that order. Call it from any thread but the loop's own."""

    def __init__(self, buffer: Buffer, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        self._buffer = buffer
        self._stream = stream
        self._loop = loop

    def __call__(self, sample_ids: Sequence[str]) -> list[Sample]:
        if not sample_ids:
            return []
        pending = asyncio.run_coroutine_threadsafe(self._fetch(sample_ids), self._loop)
        return pending.result(_SECONDS + 5.0)

    async def _fetch(self, sample_ids: Sequence[str]) -> list[Sample]:
        packed = await self._buffer.fetch_samples(self._stream, sample_ids, deadline_seconds=_SECONDS)
        return [Sample.unpack(sample) for sample in packed]
