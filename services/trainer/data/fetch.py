"""A rank's own samples, from the buffer, asked for by the compute thread and carried by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DataLoss, HeadraceError, InvalidArgument, NotFound
from headrace.trajectory import Sample
from services.trainer.data.buffer_port import TrainerBuffer
from services.trainer.data.reading import Read, UnusableSample

_SECONDS = 600.0
_AT_ONCE = 2
_OF_ONE_SAMPLE = (DataLoss, InvalidArgument, NotFound)
"""Errors that another sample does not share."""


class Fetch:
    """`fetch(sample_ids)` gives the samples in that order, each of them or why it cannot be read.

    Call it from any thread but the loop's own.
    What was begun before is only waited for. Two may be under way, a step's and the next one's; a third ends the first.
    """

    def __init__(self, buffer: TrainerBuffer, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        self._buffer = buffer
        self.stream = stream
        self._loop = loop
        self._begun: dict[tuple[str, ...], Future[list[Read]]] = {}

    def begin(self, sample_ids: Sequence[str]) -> None:
        """Fetches in the background: the compute thread goes on."""
        wanted = tuple(sample_ids)
        if not wanted or wanted in self._begun:
            return
        self._begun[wanted] = asyncio.run_coroutine_threadsafe(self._fetch(wanted), self._loop)
        if len(self._begun) > _AT_ONCE:
            self._begun.pop(next(iter(self._begun))).cancel()

    def __call__(self, sample_ids: Sequence[str]) -> list[Read]:
        if not sample_ids:
            return []
        self.begin(sample_ids)
        return self._begun.pop(tuple(sample_ids)).result(_SECONDS + 5.0)

    async def _fetch(self, sample_ids: Sequence[str]) -> list[Read]:
        """One sample that the ledger cannot give must not keep the others: then each half is asked for alone."""
        try:
            packed = await self._packed(sample_ids)
        except _OF_ONE_SAMPLE:
            if len(sample_ids) == 1:
                return [await self._again(sample_ids[0])]
            half = len(sample_ids) // 2
            return [*await self._fetch(sample_ids[:half]), *await self._fetch(sample_ids[half:])]
        return [await self._opened(sample_id, sample) for sample_id, sample in zip(sample_ids, packed, strict=True)]

    async def _opened(self, sample_id: str, packed: sample_pb2.Sample) -> Read:
        try:
            return Sample.unpack(packed)
        except HeadraceError:
            return await self._again(sample_id)

    async def _again(self, sample_id: str) -> Read:
        """The last word: what was damaged on its way comes whole the second time."""
        try:
            (packed,) = await self._packed([sample_id])
            return Sample.unpack(packed)
        except _OF_ONE_SAMPLE as error:
            return UnusableSample(sample_id, error.reason, error.message)

    async def _packed(self, sample_ids: Sequence[str]) -> Sequence[sample_pb2.Sample]:
        return await self._buffer.fetch_samples(self.stream, sample_ids, deadline_seconds=_SECONDS)
