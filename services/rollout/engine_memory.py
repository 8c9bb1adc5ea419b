"""Engines' memory on devices that they share with the trainer: both take turns on them.

  TRAINER'S ──resume──► ENGINES' ──release──► TRAINER'S …    a service begins with the trainer's: it may be training
In the trainer's turn no engine has memory on a device: it is RELEASED, alive with its requests waiting, or DOWN, and
starts in the engines' next turn. In theirs, one that was RELEASED is STALE: it waits for a publication.
Nothing here is durable. A trainer that starts releases, whatever was before; a service that starts has no engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headrace.errors import Aborted, DeadlineExceeded, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.rpc.log import log
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.receiver import Receiver

_CALL_SECONDS = 60.0
_IDLE_SECONDS = 30.0
"""An engine whose requests were ended has so long to forget them."""
_POLL_SECONDS = 0.05
_THE_TRAINER = "the trainer has the devices"
_ENDED = (EngineState.DOWN, EngineState.QUARANTINED, EngineState.LEAVING)


class Leasing(Protocol):
    """Producers, whom several parties may pause."""

    def pause(self, by: str) -> None:
        """No more groups are leased."""

    def resume(self, by: str) -> None:
        """They are again, unless somebody else pauses it."""


class EngineMemory:
    """Changes are made one after the other, and to their end: a caller that goes away changes nothing."""

    def __init__(self, fleet: Fleet, leasing: Leasing, receiver: Receiver) -> None:
        self._fleet = fleet
        self._leasing = leasing
        self._receiver = receiver
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._take_away()

    @property
    def is_trainers(self) -> bool:
        """True while engines may have no memory."""
        return not self._fleet.may_start.is_set()

    async def release(self, epoch: int) -> Sequence[str]:
        """Returns the engines that live on, once none has memory on a device. `epoch` 0: a trainer without one yet.

        Raises Fenced for an older epoch.
        """
        if epoch < 0:
            raise InvalidArgument(f"epoch is {epoch}: should be 0 or more", field="epoch")
        if epoch:
            self._receiver.fence.check(epoch)
        await self._changed(self._release)
        return self._ids(EngineState.RELEASED)

    async def resume(self, epoch: int) -> Sequence[str]:
        """Returns the engines that can take weights, once there is one and each has started that never had.

        Raises Fenced for an older epoch, Aborted when they are released meanwhile.
        """
        if epoch < 1:
            raise InvalidArgument(f"epoch is {epoch}: should be the ledger's, from 1 on", field="epoch")
        self._receiver.fence.check(epoch)
        await self._changed(self._resume)
        while not self._fleet.alive() or any(map(_starts_for_the_first_time, self._fleet.engines)):
            if self.is_trainers:
                raise Aborted("the devices were taken back before an engine had its memory", reason="MEMORY_RELEASED")
            await asyncio.sleep(_POLL_SECONDS)  # their start has its own limit, and the caller's deadline ends this
        return [engine.engine_id for engine in self._fleet.alive()]

    async def stop(self) -> None:
        """Ends the changes that go on."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _changed(self, change: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with self._one_at_a_time:
                await change()

        task = asyncio.create_task(run())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    def _take_away(self) -> None:
        self._fleet.may_start.clear()
        self._leasing.pause(_THE_TRAINER)

    async def _release(self) -> None:
        log.info("memory_release_begins", engines=len(self._fleet.engines))
        self._take_away()
        await self._receiver.close(_THE_TRAINER)
        while any(map(_is_starting, self._fleet.engines)):  # each has its limit, and no other begins
            await asyncio.sleep(_POLL_SECONDS)
        self._fleet.activity.stand_still()
        await asyncio.gather(*map(self._emptied, self._fleet.engines))
        log.info("engine_memory_released", engines=self._ids(EngineState.RELEASED))

    async def _emptied(self, engine: Engine) -> None:
        """The engine has no memory: it has released it, or has ended."""
        process = engine.process
        if process is None or engine.state is EngineState.RELEASED:
            return
        if engine.state in _ENDED:
            await process.stop(grace_seconds=0.0)
            return
        try:
            await engine.client.pause("abort")
            await _until_idle(engine)
            await engine.client.release_memory(seconds=_CALL_SECONDS)
        except Exception as error:  # noqa: BLE001  # whatever it was: the trainer must not find its memory taken
            await self._fleet.give_up(engine, f"did not release its memory: {error}")
            return
        self._fleet.weights.refuse(engine.weights_name)
        if engine.state is not EngineState.DOWN:  # since it was asked
            engine.state, engine.weights_digest = EngineState.RELEASED, ""

    async def _resume(self) -> None:
        log.info("memory_resume_begins", engines=self._ids(EngineState.RELEASED))
        await asyncio.gather(*map(self._filled, self._fleet.engines))
        self._fleet.may_start.set()
        self._leasing.resume(_THE_TRAINER)
        log.info("engine_memory_resumed", engines=self._ids(EngineState.STALE))

    async def _filled(self, engine: Engine) -> None:
        if engine.state is not EngineState.RELEASED:
            return
        try:
            await engine.client.resume_memory(seconds=_CALL_SECONDS)
        except HeadraceError as error:  # nobody knows what it has now
            await self._fleet.give_up(engine, f"did not take its memory back: {error.message}")
            return
        if engine.state is EngineState.RELEASED:
            engine.state = EngineState.STALE

    def _ids(self, state: EngineState) -> list[str]:
        return [engine.engine_id for engine in self._fleet.engines if engine.state is state]


def require_shared(memory: EngineMemory | None) -> EngineMemory:
    """Raises FailedPrecondition where engines have their devices to themselves."""
    if memory is None:
        raise FailedPrecondition(
            "engines keep their memory: the job says neither --colocate nor --offload-rollout", reason="NOT_COLOCATED"
        )
    return memory


async def _until_idle(engine: Engine) -> None:
    """SGLang ends a scheduler that is asked for its memory while it still has requests."""
    try:
        async with asyncio.timeout(_IDLE_SECONDS):
            while not await engine.client.flush_cache():
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise DeadlineExceeded(f"its requests did not end within {_IDLE_SECONDS:g} s") from error


def _is_starting(engine: Engine) -> bool:
    """An engine is STARTING from when it is made, before it may have a process."""
    return engine.state is EngineState.STARTING and engine.process is not None


def _starts_for_the_first_time(engine: Engine) -> bool:
    return engine.state is EngineState.STARTING and not engine.restarts
