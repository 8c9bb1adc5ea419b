"""Changes the number of engines while they serve.

In: a number. Out: engines that are added to the fleet, or taken out of it once their requests are done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.process.linux import free_bytes
from headrace.rpc.log import kept_running
from services.rollout.engine.fleet import Engine, EngineState, Fleet, FleetObserver

NO_ENGINES = (
    "this run trains conversations as they are given and has no engines: start it again with --eval-prompt-data NAME "
    "PATH to have some, or ask its weights with `headrace eval` once it has ended"
)
_FIELD = "num_engines"
_SPARE_BYTES = 512 << 20
"""Left to everything else on the machine."""
_WITH_ALL_MEMORY = (
    EngineState.READY,
    EngineState.STALE,
    EngineState.UPDATING,
    EngineState.LEAVING,
    EngineState.RELEASED,  # on a CPU, where nothing is released
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """`num_slots`: the engines that GPUs are for; None on a CPU, where the memory decides unless the job does."""

    num_slots: int | None = None
    most: int | None = None
    """The job's rollout_max_engines."""
    elsewhere: bool = False
    """Engines are started by somebody else."""
    is_asked: bool = True
    """False for a run whose samples need no engine."""
    free_bytes: Callable[[], int] = free_bytes

    async def require(self, num_engines: int, fleet: Sequence[Engine]) -> None:
        """Raises what keeps the fleet from having `num_engines` engines, with the way out."""
        if not self.is_asked:
            raise FailedPrecondition(NO_ENGINES)
        if self.elsewhere:
            raise FailedPrecondition(
                "engines are started elsewhere (rollout_external_engine_addrs): start or end them there, and start the "
                "rollout service again with their addresses"
            )
        if num_engines < 1:
            raise InvalidArgument(
                f"{_FIELD} {num_engines}: a fleet has at least 1 engine; to generate nothing for a while, call "
                "PauseProduction",
                field=_FIELD,
            )
        if self.most is not None and num_engines > self.most:
            raise InvalidArgument(
                f"{_FIELD} {num_engines} is above rollout_max_engines {self.most}: scale to {self.most}, or start the "
                "rollout service again with a larger --rollout-max-engines",
                field=_FIELD,
            )
        if self.num_slots is not None and num_engines > self.num_slots:
            raise InvalidArgument(
                f"{_FIELD} {num_engines}: the GPUs of rollout_num_gpus are for {self.num_slots} engines: scale to "
                f"{self.num_slots}, or start the rollout service again with more --rollout-num-gpus",
                field=_FIELD,
            )
        if self.num_slots is None and self.most is None:
            await self._require_memory(num_engines, fleet)

    async def _require_memory(self, num_engines: int, fleet: Sequence[Engine]) -> None:
        staying = [engine for engine in fleet if engine.state is not EngineState.LEAVING]
        with_memory = [engine for engine in fleet if engine.state in _WITH_ALL_MEMORY]
        sizes = await asyncio.to_thread(_sizes, with_memory)
        if num_engines <= len(staying):
            return
        if not sizes:
            raise ResourceExhausted(
                f"{_FIELD} {num_engines}: no engine runs now that shows how much memory one takes: ask again when one "
                "does, or set --rollout-max-engines, which then is the only limit",
                reason="NO_MEMORY_FOR_ENGINES",
            )
        each, free = max(sizes), self.free_bytes() - _SPARE_BYTES
        to_come = sum(engine not in with_memory for engine in staying)
        room = max(free, 0) // each - to_come
        if num_engines - len(staying) > room:
            most = max(len(staying) + room, 1)
            raise ResourceExhausted(
                f"{_FIELD} {num_engines}: an engine takes {each / 1e9:.1f} GB here, and {max(free, 0) / 1e9:.1f} GB of "
                f"memory are free: scale to {most}, lower --sglang-max-total-tokens, or set --rollout-max-engines, "
                "which then is the only limit",
                reason="NO_MEMORY_FOR_ENGINES",
            )


def _sizes(engines: Sequence[Engine]) -> list[int]:
    sizes = [engine.process.memory_bytes() for engine in engines if engine.process]
    return [size for size in sizes if size]


# Brings the fleet to a number of engines, and keeps what it takes apart whole.
# scale(N) ─► more:  an engine for each free slot; a slot of GPUs is free once the engine that leaves it has ended
#         └─► fewer: engines that do not serve go first, then the highest numbers. One that takes part in a publication
#                    leaves after it: its collective needs it. Until it leaves, a larger N keeps it.
# Nothing here is durable: a service that starts again has the job's number.

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
