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
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.job.engine_shape import EngineShape
from headrace.job.schema.placement import PlacementSection
from headrace.process.exit_status import meaning
from headrace.rpc.log import kept_running, log
from headrace.rpc.retry import Backoff
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import EngineFactory, EngineProcess
from services.rollout.engine.replies import BadAnswer
from services.rollout.engine.weights import INITIAL_VERSION, ServedWeights


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """`group` is the name of the job's engine group; empty where it has none."""

    shape: EngineShape
    group: str = ""
    worker_type: str = "regular"


SlotOf = Callable[[int], EngineSlot]
"""The slot with a number."""


def alike(shape: EngineShape) -> SlotOf:
    """Slots that are all the same."""
    slot = EngineSlot(shape)
    return lambda _: slot


_FORGIVEN_BAD_ANSWERS = 2


class EngineState(StrEnum):
    """The proto's EngineState without its prefix."""

    STARTING = "STARTING"
    READY = "READY"
    UPDATING = "UPDATING"
    STALE = "STALE"
    DOWN = "DOWN"
    QUARANTINED = "QUARANTINED"
    LEAVING = "LEAVING"
    RELEASED = "RELEASED"


class Engine:
    """One slot of the fleet. The process in it changes; `incarnation` tells which one it is."""

    def __init__(self, number: int, slot: EngineSlot) -> None:
        self.engine_id = f"engine-{number}"
        self.number = number
        self.shape, self.group, self.worker_type = slot.shape, slot.group, slot.worker_type
        self.state = EngineState.STARTING
        self.policy_version = INITIAL_VERSION
        self.restarts = 0
        self.incarnation = ""
        """The current process: no other has it, nor one of an engine that had this number before."""
        self.weights_digest = ""
        self.weights_name = ""
        self.adapters: set[str] = set()
        """Those that its process has loaded."""
        self.is_suspect = False
        self.bad_answers = 0
        self.distrust = ""
        """Why it may serve no more; empty while it may."""
        self.trouble = ""
        """Why its process was ended last; empty if none was."""
        self.has_served = False
        """True once it was in routing."""
        self._short_lives = 0
        self._serves_since = 0.0
        self.process: EngineProcess | None = None
        self._client: EngineClient | None = None

    @property
    def url(self) -> str:
        """The current HTTP address; empty before the first start."""
        return self.process.url if self.process else ""

    @property
    def is_leaving(self) -> bool:
        """True from the moment from which it gets no more requests, for good."""
        return self.state is EngineState.LEAVING

    @property
    def client(self) -> EngineClient:
        """The client of the current process."""
        if self._client is None:
            assert self.process is not None, f"{self.engine_id} was never started"
            self._client = EngineClient(self.process.url)  # which another machine may choose when it starts it
        return self._client

    async def occupy(self, process: EngineProcess) -> None:
        """Puts another process in the slot."""
        if self._client:
            await self._client.close()
        self.incarnation = f"{self.engine_id}#{secrets.token_hex(4)}"
        self.is_suspect, self.bad_answers, self.distrust = False, 0, ""
        self.process, self._client, self.adapters = process, None, set()

    async def leave(self) -> None:
        if self._client:
            await self._client.close()
        if self.process:
            await self.process.stop()

    def began_to_serve(self) -> None:
        self._serves_since = time.monotonic()

    def ended(self, why: str, good_seconds: float) -> int:
        """Notes why its process ended, and returns how many have ended one after the other before `good_seconds`."""
        if self._serves_since and time.monotonic() - self._serves_since >= good_seconds:
            self._short_lives = 0
        self.trouble, self._serves_since = why, 0.0
        self._short_lives += 1
        return self._short_lives

    def bad_answer(self, why: str) -> None:
        """Counts a bad response; after too many the engine is distrusted."""
        self.bad_answers += 1
        if self.bad_answers > _FORGIVEN_BAD_ANSWERS:
            self.distrust = f"gave {self.bad_answers} bad answers, the last: {why}"


_POLL_SECONDS = 0.5
_TIMES_FREE = 2
"""An engine notes its requests every few steps, so a count of 0 may be older than the latest request."""
_ENDING_SECONDS = 5.0
"""Responses that were aborted have so long to reach their callers."""


async def drain(engine: Engine, seconds: float) -> None:
    """Returns once an engine out of routing has no requests; those left after `seconds` end with the tokens so far.

    An engine that does not answer has none that could be saved.
    """
    if engine.process is None or engine.process.exit_code is not None:
        return
    for within in (seconds, _ENDING_SECONDS):
        try:
            await _finished(engine, within)
            await engine.client.abort_all()  # after the first time also for one that was on its way, uncounted
        except HeadraceError as error:
            log.warning("engine_not_drained", engine=engine.engine_id, error=error.message)


async def _finished(engine: Engine, seconds: float) -> None:
    end, times_free = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        times_free = 0 if await engine.client.num_requests() else times_free + 1
        if times_free == _TIMES_FREE:
            return
        await asyncio.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class FleetTiming:
    """Seconds, how many missed checks in a row end an engine, and how often one is started again."""

    start_seconds: float = 600.0
    check_interval_seconds: float = 2.0
    check_timeout_seconds: float = 10.0
    missed_checks: int = 5
    max_restarts: int = 5
    """An engine that ended more often than this, each time before it had served `good_seconds`, stays down."""
    good_seconds: float = 600.0

    @classmethod
    def of(cls, placement: PlacementSection, *, start_seconds: float) -> FleetTiming:
        return cls(
            start_seconds=start_seconds,
            check_interval_seconds=placement.rollout_health_check_interval,
            check_timeout_seconds=placement.rollout_health_check_timeout,
        )


class FleetObserver:
    """Counts what a fleet reports."""

    def bad_answer(self, kind: str) -> None:
        """An engine gave an impossible response."""

    def background_work_ended(self, name: str) -> None:
        """A background task raised, and is started again."""


class Watch:
    """Watches a fleet's engines."""

    def __init__(self, timing: FleetTiming, observer: FleetObserver) -> None:
        self._timing = timing
        self._observer = observer

    async def trouble(self, engine: Engine) -> str:
        """Returns once the engine has to be replaced, and says why."""
        process = engine.process
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        missed = 0
        try:
            while True:
                await asyncio.wait([ended], timeout=self._timing.check_interval_seconds)
                if ended.done():
                    how = meaning(ended.result(), process.resident_bytes)
                    return f"ended with {how}; the end of its log:\n{process.last_lines()}"
                missed = 0 if await self._is_well(engine) else missed + 1
                if missed >= self._timing.missed_checks:
                    return f"missed {missed} checks in a row"
                if engine.is_suspect and engine.state is EngineState.READY and engine.worker_type == "regular":
                    await self._examine(engine)
                if engine.distrust:
                    return engine.distrust
        finally:
            ended.cancel()

    async def _is_well(self, engine: Engine) -> bool:
        """True when the engine answers. In routing with other weights than it was given, it is distrusted."""
        if engine.state is EngineState.UPDATING:
            return True  # the publication has its own deadline
        given, was_ready = engine.weights_name, engine.state is EngineState.READY
        try:
            name = await engine.client.weights_name(seconds=self._timing.check_timeout_seconds)
        except HeadraceError as error:
            if isinstance(error, BadAnswer):
                self._observer.bad_answer(error.kind)
            log.info("engine_check_missed", engine=engine.engine_id, error=error.message)
            return False
        is_same_moment = engine.state is EngineState.READY and engine.weights_name == given
        if was_ready and is_same_moment and name != given:
            self._observer.bad_answer("other_weights")
            engine.distrust = f"says that it has the weights {name[:80]!r}, it was given {given!r}"
        return True

    async def _examine(self, engine: Engine) -> None:
        """Asks the engine for one token, to learn whether this engine gives bad responses."""
        given, engine.is_suspect = engine.weights_name, False
        try:
            answer = await engine.client.generate(
                (0,),
                SamplingParams(max_new_tokens=1),
                request_id=f"examination-{given}",
                cache_key=given,
                seconds=self._timing.check_timeout_seconds,
            )
            if engine.weights_name == given and any(span.name != given for span in answer.spans):
                raise BadAnswer("unknown_version", f"tokens of {answer.spans[0].name[:80]!r}, not of {given!r}")
        except (BadAnswer, InvalidArgument, FailedPrecondition) as error:
            engine.is_suspect = True
            engine.bad_answer(error.message)
        except HeadraceError as error:
            log.info("examination_without_answer", engine=engine.engine_id, error=error.message)


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
        self._slot_of = alike(EngineShape(slots)) if isinstance(slots, int) else slots
        self.engines: Sequence[Engine] = [Engine(number, self._slot_of(number)) for number in range(count)]
        """All engines by number, including those that leave."""
        self.weights = ServedWeights()
        self.joined: dict[str, ServedWeights] = {}
        """What runs that share the engines are served, by their names."""
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
        if not await self._has_adapters(engine):
            engine.state = EngineState.STALE
            await self._take_out(engine)
            return
        if self.weights.adapter:
            policy_version, is_initial = self.policy_version, False
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

    async def _has_adapters(self, engine: Engine) -> bool:
        """Loads the adapters that any run is served and the engine lacks. False where one cannot be loaded."""
        process = engine.process
        while served := [w for w in (self.weights, *self.joined.values()) if w.adapter not in {"", *engine.adapters}]:
            name, folder = served[0].adapter, str(served[0].adapter_folder)
            try:
                await engine.client.load_adapter(name, folder, seconds=self._timing.start_seconds)
            except HeadraceError as error:
                log.warning("adapter_not_loaded", adapter=name, engine=engine.engine_id, error=error.message)
                return False
            if engine.process is not process:
                return False
            engine.adapters.add(name)
        return True

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
