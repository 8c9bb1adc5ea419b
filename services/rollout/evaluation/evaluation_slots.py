"""The samples of evaluations that may be in flight: few beside training's samples, more while there are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.rollout.production.sampling import Sampler

_LOOK_AGAIN_SECONDS = 0.1


class EvaluationSlots:
    """Shared by all evaluations; `sampler` is training's.

    `beside` slots are free while training's samples are generated, else `alone`.
    """

    def __init__(self, sampler: Sampler, *, beside: int, alone: int) -> None:
        self._sampler = sampler
        self._beside = beside
        self._alone = alone
        self._in_use = 0
        self._in_use_of_sampler = 0
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def slot(self, sampler: Sampler) -> AsyncIterator[None]:
        """Waits for a slot for a sample of this sampler.

        It comes: at least one is free beside training, and every sample has a time limit.
        """
        while self._in_use >= self._limit():
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_SECONDS):  # nobody says when training's last sample is finished
                    await self._freed.wait()
        of_sampler = int(sampler is self._sampler)
        self._in_use += 1
        self._in_use_of_sampler += of_sampler
        try:
            yield
        finally:
            self._in_use -= 1
            self._in_use_of_sampler -= of_sampler
            self._freed.set()

    def _limit(self) -> int:
        return self._beside if self._sampler.in_flight > self._in_use_of_sampler else self._alone
