"""One engine of the fleet: its slot, the process in it, the watch over it, and its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.job.schema.placement import PlacementSection
from headrace.process.exit_status import meaning
from headrace.rpc.log import log
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import EngineProcess
from services.rollout.engine.weights import INITIAL_VERSION


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """`group` is the name of the job's engine group; empty where it has none."""

    tensor_parallel_size: int
    group: str = ""


SlotOf = Callable[[int], EngineSlot]
"""The slot with a number."""


def alike(tensor_parallel_size: int) -> SlotOf:
    """Slots that are all the same."""
    slot = EngineSlot(tensor_parallel_size)
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
        self.tensor_parallel_size, self.group = slot.tensor_parallel_size, slot.group
        self.state = EngineState.STARTING
        self.policy_version = INITIAL_VERSION
        self.restarts = 0
        self.incarnation = ""
        """The current process: no other has it, nor one of an engine that had this number before."""
        self.weights_digest = ""
        self.weights_name = ""
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
        self.process, self._client = process, None

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
                if engine.is_suspect and engine.state is EngineState.READY:
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
