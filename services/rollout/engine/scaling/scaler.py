"""Brings the fleet to a number of engines, and keeps what it takes apart whole.

scale(N) ─► more:  an engine for each free slot; a slot of GPUs is free once the engine that leaves it has ended
        └─► fewer: engines that do not serve go first, then the highest numbers. One that takes part in a publication
                   leaves after it: its collective needs it. Until it leaves, a larger N keeps it.
Nothing here is durable: a service that starts again has the job's number.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.background import kept_running
from services.rollout.engine.engine import Engine, EngineState
from services.rollout.engine.fleet import Fleet
from services.rollout.engine.scaling.capacity import Capacity
from services.rollout.engine.watch import FleetObserver

_POLL_SECONDS = 0.1
_OF_LITTLE_USE = (EngineState.QUARANTINED, EngineState.DOWN, EngineState.STARTING, EngineState.STALE)
"""The states of engines that do not serve, from the one that is missed least."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The change that a call made."""

    wanted: int
    wanted_before: int
    coming: tuple[str, ...]
    leaving: tuple[str, ...]


class Scaler:
    """`wanted` is the number of engines that there should be."""

    def __init__(self, fleet: Fleet, capacity: Capacity, observer: FleetObserver | None = None) -> None:
        self.wanted = len(fleet.engines)
        self._fleet = fleet
        self._capacity = capacity
        self._observer = observer or FleetObserver()
        self._leaving: dict[Engine, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def scale(self, num_engines: int, *, drain_seconds: float) -> Scaled:
        """Returns at once; engines come and go from then on. Raises what `Capacity` refuses."""
        async with self._one_at_a_time:
            await self._capacity.require(num_engines, self._fleet.engines)
            before, self.wanted = self.wanted, num_engines
            leaving = self._dismiss(drain_seconds)
            return Scaled(num_engines, before, self._keep() + self._fill(), leaving)

    async def stop(self) -> None:
        """Ends what goes on; the fleet's own stop ends the engines."""
        leaving = list(self._leaving.values())
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    def _staying(self) -> list[Engine]:
        return [engine for engine in self._fleet.engines if engine not in self._leaving]

    def _dismiss(self, drain_seconds: float) -> tuple[str, ...]:
        by_use = sorted(self._staying(), key=_use)
        dismissed = by_use[: max(len(by_use) - self.wanted, 0)]
        for engine in dismissed:
            self._leaving[engine] = asyncio.create_task(self._retired(engine, drain_seconds))
        return tuple(engine.engine_id for engine in dismissed)

    def _keep(self) -> tuple[str, ...]:
        """Takes back engines whose publication has kept them so far."""
        kept = []
        for engine, task in list(self._leaving.items()):
            if len(self._staying()) < self.wanted and engine.state is EngineState.UPDATING:
                task.cancel()
                del self._leaving[engine]
                kept.append(engine.engine_id)
        return tuple(kept)

    def _fill(self) -> tuple[str, ...]:
        missing = self.wanted - len(self._staying())
        return tuple(self._fleet.add(number).engine_id for number in itertools.islice(self._free(), max(missing, 0)))

    def _free(self) -> Iterator[int]:
        taken = {engine.number for engine in self._fleet.engines}
        numbers = itertools.count() if self._capacity.num_slots is None else range(self._capacity.num_slots)
        return (number for number in numbers if number not in taken)

    async def _retired(self, engine: Engine, drain_seconds: float) -> None:
        async def work() -> None:
            while engine.state is EngineState.UPDATING:  # until its publication's deadline at the latest
                await asyncio.sleep(_POLL_SECONDS)
            await self._fleet.retire(engine, drain_seconds=drain_seconds)

        await kept_running(f"retire {engine.engine_id}", work, self._observer.background_work_ended)
        del self._leaving[engine]
        self._fill()


def _use(engine: Engine) -> tuple[int, int]:
    """Sorts the engines that are missed least to the front."""
    states = len(_OF_LITTLE_USE)
    return (_OF_LITTLE_USE.index(engine.state) if engine.state in _OF_LITTLE_USE else states, -engine.number)
