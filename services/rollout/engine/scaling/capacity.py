"""Knows how many engines a job and its machine have room for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.process.memory import free_bytes
from services.rollout.engine.engine import Engine, EngineState

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
