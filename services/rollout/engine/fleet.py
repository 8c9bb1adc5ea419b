"""The engines: which are alive, which weights they have, which are in routing. A dead engine is started again.

  STARTING ──► READY ⇄ UPDATING ──► (lost) DOWN ──► STARTING … or, where it ended too often, QUARANTINED for good
     └──────► STALE ⇄ UPDATING          a restarted engine has hf_checkpoint's weights: it is READY only while those
                                        are the served version, else STALE until the next commit; so is one that
                                        holds a mixture after an aborted publication
  READY ──► RELEASED ──► STALE, or DOWN  on devices that are shared with the trainer: `devices`
  (any but UPDATING) ──► LEAVING ──► gone  the fleet has a slot less from then on, and `add` begins with a new one
Nothing here is durable: weights come back by publication. An engine that gives bad responses, or that names other
weights than it was given, goes DOWN.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from headrace.errors import HeadraceError, Unavailable
from headrace.rpc.log import kept_running, log
from headrace.rpc.retry import Backoff
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.engine import Engine, EngineState, FleetObserver, FleetTiming, SlotOf, Watch, alike, drain
from services.rollout.engine.process import EngineFactory, EngineProcess
from services.rollout.engine.weights import INITIAL_VERSION, ServedWeights


class Activity:
    """Adds up engines' busy seconds. N requests keep at most N engines busy, and a standstill keeps none busy."""

    def __init__(self, num_engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_engines = num_engines
        self._clock = clock
        self._requests = 0
        self._stands_still = False
        self._busy_seconds = 0.0
        self._counted_until = clock()
        self._lap_began: float | None = None

    @contextmanager
    def requests(self, count: int = 1) -> Iterator[None]:
        """Counts `count` requests as being with the engines while the block runs."""
        self._count()
        self._requests += count
        try:
            yield
        finally:
            self._count()
            self._requests -= count

    def resize(self, num_engines: int) -> None:
        """The requests are shared by `num_engines` engines from now on."""
        self._count()
        self.num_engines = num_engines

    def stand_still(self) -> None:
        """All engines are about to pause for new weights."""
        self._count()
        self._stands_still = True

    def go_on(self) -> None:
        """An engine generates again."""
        self._count()
        self._stands_still = False

    def lap(self) -> float | None:
        """Returns the busy share of the engines' time since the last lap, in [0, 1]; None the first time."""
        self._count()
        began, self._lap_began = self._lap_began, self._counted_until
        busy_seconds, self._busy_seconds = self._busy_seconds, 0.0
        if began is None or self._counted_until <= began:
            return None
        return min(busy_seconds / (self._counted_until - began), 1.0)

    def _count(self) -> None:
        now = self._clock()
        if self.num_engines and not self._stands_still:
            share = min(self._requests / self.num_engines, 1.0)
            self._busy_seconds += (now - self._counted_until) * share
        self._counted_until = now


__all__ = ["Engine", "EngineState", "Fleet", "FleetObserver", "FleetTiming", "Routing"]

_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 30.0


class Routing(Protocol):
    """The routing of requests to engines."""

    async def add(self, engine_url: str) -> None:
        """Returns when requests are routed to the engine."""

    async def remove(self, engine_url: str) -> None:
        """Does nothing when the engine is not in routing."""


class Fleet:
    """Starts, watches and restarts engines, and keeps routing to those that have the served version."""

    def __init__(
        self,
        count: int,
        slots: int | SlotOf,
        factory: EngineFactory,
        routing: Routing,
        timing: FleetTiming,
        observer: FleetObserver | None = None,
        *,
        begins_with_checkpoint: bool = True,
    ) -> None:
        """`slots` says what each engine is; a number is the tensor-parallel size of all.

        `begins_with_checkpoint`: an engine that starts has hf_checkpoint's weights; else nobody knows which.
        """
        self._slot_of = alike(slots) if isinstance(slots, int) else slots
        self.engines: Sequence[Engine] = [Engine(number, self._slot_of(number)) for number in range(count)]
        """All engines by number, including those that leave."""
        self.weights = ServedWeights()
        self.activity = Activity(count)
        self.may_start = asyncio.Event()
        """Unset while the devices are the trainer's: engines that ended meanwhile wait for it."""
        self.may_start.set()
        self._observer = observer or FleetObserver()
        self._factory = factory
        self._routing = routing
        self._begins_with_checkpoint = begins_with_checkpoint
        self._timing = timing
        self._watch_over = Watch(timing, self._observer)
        self._watchers: dict[Engine, asyncio.Task[None]] = {}
        self._published = False
        self._all_quarantined = asyncio.Event()

    @property
    def policy_version(self) -> int:
        """The version with which new samples are generated."""
        return self.weights.policy_version

    async def start(self) -> None:
        """Returns when all engines are ready. Raises Unavailable when one does not start."""
        await self._devices()
        starts = [asyncio.create_task(self._start(engine)) for engine in self.engines]
        try:
            await asyncio.gather(*starts)
        except (HeadraceError, OSError):
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        for engine in self.engines:
            self._watchers[engine] = asyncio.create_task(self._watched(engine))

    async def stop(self) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        await asyncio.gather(*(engine.leave() for engine in self.engines))

    async def lost(self) -> None:
        """Raises Unavailable once every engine is in quarantine, with each one's reason."""
        await self._all_quarantined.wait()
        reasons = "\n".join(f"{engine.engine_id}: {engine.trouble}" for engine in self.engines)
        raise Unavailable(f"every engine ended too often:\n{reasons}", reason="ENGINES_LOST")

    def alive(self) -> list[Engine]:
        """Returns the engines that can take part in a publication."""
        return [e for e in self.engines if e.state in (EngineState.READY, EngineState.STALE)]

    def add(self, number: int) -> Engine:
        """Returns an engine that is started from now on, again and again where it fails, as one that was lost is."""
        engine = Engine(number, self._slot_of(number))
        self.engines = sorted([*self.engines, engine], key=lambda each: each.number)
        self._watchers[engine] = asyncio.create_task(self._watched(engine))
        return engine

    async def retire(self, engine: Engine, *, drain_seconds: float) -> None:
        """Returns once the engine is gone. Its requests have `drain_seconds`; the rest is continued by other engines.

        It must not be UPDATING. Calling it again goes on with it.
        """
        seconds = drain_seconds if engine.state in (EngineState.READY, EngineState.LEAVING) else 0.0
        engine.state = EngineState.LEAVING
        self.activity.resize(self._num_sharing())
        log.info("engine_leaves", engine=engine.engine_id)
        if watcher := self._watchers.pop(engine, None):
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self.weights.refuse(engine.weights_name)
        await self._take_out(engine)
        await drain(engine, seconds)
        await engine.leave()
        self.engines = [each for each in self.engines if each is not engine]
        self._note_if_lost()
        log.info("engine_left", engine=engine.engine_id)

    async def interrupt(self) -> None:
        """Ends every request at every engine; their responses have the tokens so far."""
        generating = (EngineState.READY, EngineState.LEAVING)
        ends = (e.client.abort_all() for e in self.engines if e.process and e.state in generating)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, HeadraceError):
                log.warning("requests_not_aborted", error=result.message)

    def suspect(self, error: BadAnswer) -> None:
        """Counts a bad response. If it does not say which engine gave it, every engine in routing is examined soon."""
        self._observer.bad_answer(error.kind)
        log.warning("bad_answer", kind=error.kind, message=error.message, weights=error.name)
        whose = self.weights.engine_of(error.name) if error.name else None
        for engine in self.engines:
            if whose is None:
                engine.is_suspect = True
            elif error.name == engine.weights_name:
                engine.bad_answer(error.message)

    async def serve(self, engine: Engine, policy_version: int, *, is_initial: bool = False) -> None:
        """Notes the engine's weights; it is in routing while they are the served ones.

        `is_initial`: they are hf_checkpoint's, which a publication of the same version may have replaced.
        """
        if engine.is_leaving:
            return
        engine.policy_version = policy_version
        if policy_version != self.policy_version or (is_initial and self._published):
            engine.state = EngineState.STALE
            await self._take_out(engine)
            return
        try:
            await self._routing.add(engine.url)
        except HeadraceError as error:
            if not engine.is_leaving:
                await self.give_up(engine, error.message)
            return
        if engine.is_leaving:  # since it was asked for
            await self._take_out(engine)
            return
        if policy_version != self.policy_version:  # another one was committed meanwhile
            engine.state = EngineState.STALE
            await self._take_out(engine)
            return
        engine.state, engine.has_served = EngineState.READY, True
        self.activity.resize(self._num_sharing())
        self.activity.go_on()

    async def switch_to(self, policy_version: int) -> None:
        """Serves this version from now on; engines in routing with another one become STALE."""
        self._published = True
        self.weights.switch_to(policy_version)
        for engine in self.engines:
            if engine.state is EngineState.READY:
                await self.serve(engine, engine.policy_version)

    async def hold_back(self, engine: Engine) -> None:
        """Takes an engine out of routing until the next publication, because its weights are of no version."""
        engine.state = EngineState.STALE
        engine.weights_digest = ""
        self.weights.refuse(engine.weights_name)
        await self._take_out(engine)

    async def give_up(self, engine: Engine, why: str) -> None:
        """Takes an engine out of routing and ends it; its watcher starts it again."""
        log.warning("engine_lost", engine=engine.engine_id, why=why)
        engine.state = EngineState.DOWN
        self.weights.refuse(engine.weights_name)
        process = engine.process
        await self._take_out(engine)
        if process:  # its watcher may have put another in its place meanwhile
            await process.stop(grace_seconds=0.0)

    async def _start(self, engine: Engine) -> None:
        engine.state = EngineState.STARTING
        log.info("engine_starting", engine=engine.engine_id)
        process = self._factory(engine.number)
        await engine.occupy(process)
        try:
            await self._started(engine, process)
        except Exception:  # whatever it was: its process must not stay
            await process.stop(grace_seconds=0.0)
            raise
        engine.began_to_serve()
        log.info("engine_started", engine=engine.engine_id, url=engine.url, state=engine.state.value)

    async def _started(self, engine: Engine, process: EngineProcess) -> None:
        await process.start(seconds=self._timing.start_seconds)
        engine.weights_name = self.weights.new_name(INITIAL_VERSION, engine.engine_id)
        await engine.client.freeze_gc()
        await engine.client.name_weights(engine.weights_name)
        if not self._begins_with_checkpoint:
            await self.hold_back(engine)
            return
        self.weights.accept([engine.weights_name])
        await self.serve(engine, INITIAL_VERSION, is_initial=True)

    async def _watched(self, engine: Engine) -> None:
        await kept_running(
            f"watch {engine.engine_id}", lambda: self._watch(engine), self._observer.background_work_ended
        )

    async def _watch(self, engine: Engine) -> None:
        """Unblocked by: the end of the process, missed checks, distrust. Produces: a restart."""
        while True:
            if engine.state is not EngineState.STARTING:  # else this begins again after a restart that raised
                why = await self._watch_over.trouble(engine)
                if engine.state is not EngineState.DOWN:  # else a publication or the router failed: not its fault
                    await self.give_up(engine, why)
                    if self._stays_down(engine, why):
                        return
            if not await self._restart(engine):
                return

    async def _restart(self, engine: Engine) -> bool:
        """False when it was put in quarantine."""
        backoff = Backoff(_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
        while True:
            await self._devices()
            engine.restarts += engine.process is not None  # an engine that was added starts for the first time
            engine.weights_digest = ""
            try:
                await self._start(engine)
            except (HeadraceError, OSError) as error:
                engine.state = EngineState.DOWN
                log.error("engine_restart_failed", engine=engine.engine_id, error=str(error))
                if self._stays_down(engine, str(error)):
                    return False
            else:
                return True
            await backoff.sleep()

    async def _devices(self) -> None:
        while not self.may_start.is_set():  # it may be unset again before this runs
            await self.may_start.wait()

    def _stays_down(self, engine: Engine, why: str) -> bool:
        """Notes that its process ended. One that ends again and again would only take requests and lose them."""
        times = engine.ended(why, self._timing.good_seconds)
        if times <= self._timing.max_restarts:
            return False
        engine.state = EngineState.QUARANTINED
        log.error("engine_quarantined", engine=engine.engine_id, ended_times=times, why=why)
        self._note_if_lost()
        return True

    def _note_if_lost(self) -> None:
        if all(each.state is EngineState.QUARANTINED for each in self.engines):
            self._all_quarantined.set()

    def _num_sharing(self) -> int:
        """The engines among which requests are divided: one that was added counts once it has served."""
        return sum(each.has_served and not each.is_leaving for each in self.engines)

    async def _take_out(self, engine: Engine) -> None:
        try:
            await self._routing.remove(engine.url)
        except HeadraceError as error:
            log.warning("routing_not_changed", engine=engine.engine_id, error=error.message)
