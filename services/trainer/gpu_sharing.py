"""Takes turns on the devices with the engines, for all ranks.

  TRAINER'S ──give──► ENGINES' ──take──► TRAINER'S …   a trainer begins with its turn: it calls `clear` before it loads
A turn begins when the other side's memory is gone: engines answer when none has any, and every rank when its own is in
host memory. There is one turn for all machines, and one that does not answer is waited for. An edge may be passed again
after a failure in the middle of it: what is done is not done twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from headrace.client.rollout import RolloutClient
from headrace.errors import Fenced
from headrace.rpc.log import log

Move = Callable[[], Awaitable[object]]
"""Returns when all ranks have moved their memory."""


class OwnDevices:
    """Nobody else is there."""

    is_shared = False

    def claim(self, epoch: int) -> None: ...

    async def take(self) -> None: ...

    async def give(self) -> None: ...


@dataclass(slots=True)
class SharedDevices:
    """`engines` are all rollout services, none where they keep their memory; `seconds`: how long their start may take.

    The moves are None where ranks keep theirs.
    """

    is_shared = True

    engines: Sequence[RolloutClient]
    _: KW_ONLY
    seconds: float
    to_host: Move | None
    to_device: Move | None
    _are_engines: bool = field(default=False, init=False)
    _epoch: int = field(default=0, init=False)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def claim(self, epoch: int) -> None:
        self._epoch = epoch

    async def take(self) -> None:
        async with self._one_at_a_time:
            if not self._are_engines:
                return
            await _all(self.engines, lambda each: each.release_memory(self._epoch, deadline_seconds=self.seconds))
            if self.to_device is not None:
                await self.to_device()
            self._are_engines = False
            log.info("devices_taken")

    async def give(self) -> None:
        async with self._one_at_a_time:
            if self._are_engines:
                return
            if self.to_host is not None:
                await self.to_host()
            self._are_engines = True  # from now on engines may have some of it, whatever becomes of the call
            await _all(self.engines, lambda each: each.resume_memory(self._epoch, deadline_seconds=self.seconds))
            log.info("devices_given")


async def clear(engines: Sequence[RolloutClient], *, seconds: float) -> None:
    """Engines that an earlier trainer left with the devices give them up. Before any rank has something there."""
    released = await _all(engines, lambda each: each.release_memory(deadline_seconds=seconds))
    log.info("devices_cleared", engines=[engine_id for of_one in released for engine_id in of_one])


async def _all(
    engines: Sequence[RolloutClient], ask: Callable[[RolloutClient], Awaitable[Sequence[str]]]
) -> Sequence[Sequence[str]]:
    """Asks the services of all machines at once, and returns when each has answered or failed. Raises an error of one.

    No call is left alone while it may still change whose the devices are; Fenced, which ends a trainer, comes first.
    """
    answers = await asyncio.gather(*map(ask, engines), return_exceptions=True)
    if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise next((error for error in failed if isinstance(error, Fenced)), failed[0])
    return [answer for answer in answers if not isinstance(answer, BaseException)]
