"""The engines: who is alive, who has which weights, who is in routing. A dead engine is started again.

  STARTING ──► READY ⇄ UPDATING ──► (lost) DOWN ──► STARTING …
     └──────► STALE ⇄ UPDATING          a restarted engine has hf_checkpoint's weights: READY only while those are
                                        the served version, else STALE until the next commit; so is one that holds
                                        a mixture after a publication that was given up
Nothing here is durable: weights come back by publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.errors import HeadraceError, Unavailable
from headrace.rpc.log import log
from services.rollout.engine.arguments import INITIAL_VERSION
from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import EngineFactory, EngineProcess

_LONGEST_BACKOFF_SECONDS = 30.0


class EngineState(StrEnum):
    """As in the proto."""

    STARTING = "STARTING"
    READY = "READY"
    UPDATING = "UPDATING"
    STALE = "STALE"
    DOWN = "DOWN"


class Routing(Protocol):
    """Who gets requests."""

    async def add(self, engine_url: str) -> None:
        """Returns when requests are routed to it."""

    async def remove(self, engine_url: str) -> None:
        """Nothing happens when it is not in."""


@dataclass(frozen=True, slots=True)
class FleetTiming:
    """Seconds, and how many missed checks in a row make an engine dead."""

    start_seconds: float = 600.0
    check_interval_seconds: float = 2.0
    check_timeout_seconds: float = 10.0
    missed_checks: int = 5


class Engine:
    """One place in the fleet; the process in it changes, `restarts` tells which one it is."""

    def __init__(self, number: int, tensor_parallel_size: int) -> None:
        self.engine_id = f"engine-{number}"
        self.number = number
        self.tensor_parallel_size = tensor_parallel_size
        self.state = EngineState.STARTING
        self.policy_version = INITIAL_VERSION
        self.restarts = 0
        self.weights_digest = ""
        self.process: EngineProcess | None = None
        self._client: EngineClient | None = None

    @property
    def url(self) -> str:
        """Its HTTP address now; empty before its first start."""
        return self.process.url if self.process else ""

    @property
    def client(self) -> EngineClient:
        """Speaks to the process that is in the place now."""
        assert self._client is not None, f"{self.engine_id} was never started"
        return self._client

    @property
    def incarnation(self) -> str:
        """Changes when its process does."""
        return f"{self.engine_id}#{self.restarts}"

    async def occupy(self, process: EngineProcess) -> None:
        """Puts another process in the place."""
        if self._client:
            await self._client.close()
        self.process, self._client = process, EngineClient(process.url)

    async def leave(self) -> None:
        """Ends the process."""
        if self._client:
            await self._client.close()
        if self.process:
            await self.process.stop()


class Fleet:
    """Starts, watches and restarts engines, and keeps routing to those that have the served version."""

    def __init__(
        self, count: int, tensor_parallel_size: int, factory: EngineFactory, routing: Routing, timing: FleetTiming
    ) -> None:
        self.engines: Sequence[Engine] = [Engine(number, tensor_parallel_size) for number in range(count)]
        self.policy_version = INITIAL_VERSION
        self._factory = factory
        self._routing = routing
        self._timing = timing
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when all engines are ready. Raises Unavailable when one will not start."""
        starts = [asyncio.create_task(self._start(engine)) for engine in self.engines]
        try:
            await asyncio.gather(*starts)
        except HeadraceError:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def stop(self) -> None:
        """Ends all engines."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(engine.leave() for engine in self.engines))

    def alive(self) -> list[Engine]:
        """Those that can take part in a publication."""
        return [e for e in self.engines if e.state in (EngineState.READY, EngineState.STALE)]

    async def interrupt(self) -> None:
        """Ends every request at every engine; they answer with their tokens so far."""
        ends = (engine.client.abort_all() for engine in self.engines if engine.state is EngineState.READY)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, HeadraceError):
                log.warning("requests_not_aborted", error=result.message)

    async def serve(self, engine: Engine, policy_version: int) -> None:
        """The engine has these weights; it is in routing when they are the served ones."""
        engine.policy_version = policy_version
        if policy_version != self.policy_version:
            engine.state = EngineState.STALE
            await self._take_out(engine)
            return
        try:
            await self._routing.add(engine.url)
        except Unavailable as error:
            await self.give_up(engine, error.message)
        else:
            engine.state = EngineState.READY

    async def switch_to(self, policy_version: int) -> None:
        """From now on this version is the served one; engines in routing with another one become STALE."""
        self.policy_version = policy_version
        for engine in self.engines:
            if engine.state is EngineState.READY:
                await self.serve(engine, engine.policy_version)

    async def hold_back(self, engine: Engine) -> None:
        """Its weights are of no version: it is out of routing until the next publication."""
        engine.state = EngineState.STALE
        engine.weights_digest = ""
        await self._take_out(engine)

    async def give_up(self, engine: Engine, why: str) -> None:
        """Takes an engine out of routing and ends it; its watcher starts it again."""
        log.warning("engine_lost", engine=engine.engine_id, why=why)
        engine.state = EngineState.DOWN
        process = engine.process
        await self._take_out(engine)
        if process:  # its watcher may have put another in its place meanwhile
            await process.stop(grace_seconds=0.0)

    async def _start(self, engine: Engine) -> None:
        engine.state = EngineState.STARTING
        process = self._factory(engine.number)
        await engine.occupy(process)
        await process.start(seconds=self._timing.start_seconds)
        await self.serve(engine, INITIAL_VERSION)
        log.info("engine_started", engine=engine.engine_id, url=engine.url, state=engine.state.value)

    async def _watch(self, engine: Engine) -> None:
        """Unblocked by the end of the process or by missed checks; produces a restart."""
        while True:
            why = await self._trouble(engine)
            if engine.state is not EngineState.DOWN:
                await self.give_up(engine, why)
            await self._restart(engine)

    async def _trouble(self, engine: Engine) -> str:
        process = engine.process
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        missed = 0
        try:
            while True:
                await asyncio.wait([ended], timeout=self._timing.check_interval_seconds)
                if ended.done():
                    return f"ended with exit code {ended.result()}; the end of its log:\n{process.last_lines()}"
                missed = 0 if await self._is_well(engine) else missed + 1
                if missed >= self._timing.missed_checks:
                    return f"missed {missed} checks in a row"
        finally:
            ended.cancel()

    async def _is_well(self, engine: Engine) -> bool:
        if engine.state is EngineState.UPDATING:
            return True  # the publication has its own deadline
        try:
            await engine.client.weight_version(seconds=self._timing.check_timeout_seconds)
        except HeadraceError as error:
            log.info("engine_check_missed", engine=engine.engine_id, error=error.message)
            return False
        return True

    async def _restart(self, engine: Engine) -> None:
        backoff_seconds = 0.5
        while True:
            engine.restarts += 1
            engine.weights_digest = ""
            try:
                return await self._start(engine)
            except HeadraceError as error:
                engine.state = EngineState.DOWN
                log.error("engine_restart_failed", engine=engine.engine_id, error=error.message)
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, _LONGEST_BACKOFF_SECONDS)

    async def _take_out(self, engine: Engine) -> None:
        try:
            await self._routing.remove(engine.url)
        except Unavailable as error:
            log.warning("routing_not_changed", engine=engine.engine_id, error=error.message)
