"""A rank's own samples, from the buffer, asked for by the compute thread and carried by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from headrace.client.port import Buffer
from headrace.trajectory import Sample

_SECONDS = 600.0
_AT_ONCE = 2


class Fetch:
    """`fetch(sample_ids)` gives the samples in that order. Call it from any thread but the loop's own.

    What was begun before is only waited for. Two may be under way, a step's and the next one's; a third ends the first.
    """

    def __init__(self, buffer: Buffer, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        self._buffer = buffer
        self.stream = stream
        self._loop = loop
        self._begun: dict[tuple[str, ...], Future[list[Sample]]] = {}

    def begin(self, sample_ids: Sequence[str]) -> None:
        """In the background: the compute thread goes on."""
        wanted = tuple(sample_ids)
        if not wanted or wanted in self._begun:
            return
        self._begun[wanted] = asyncio.run_coroutine_threadsafe(self._fetch(wanted), self._loop)
        if len(self._begun) > _AT_ONCE:
            self._begun.pop(next(iter(self._begun))).cancel()

    def __call__(self, sample_ids: Sequence[str]) -> list[Sample]:
        if not sample_ids:
            return []
        self.begin(sample_ids)
        return self._begun.pop(tuple(sample_ids)).result(_SECONDS + 5.0)

    async def _fetch(self, sample_ids: Sequence[str]) -> list[Sample]:
        packed = await self._buffer.fetch_samples(self.stream, sample_ids, deadline_seconds=_SECONDS)
        return [Sample.unpack(sample) for sample in packed]
