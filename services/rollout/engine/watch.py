"""An engine is watched: it must run, answer, have the weights that it was given, and give good responses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.job.schema.placement import PlacementSection
from headrace.process.ended import meaning
from headrace.rpc.log import log
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.engine import Engine, EngineState


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
            missed_checks=placement.rollout_health_check_misses,
            max_restarts=placement.max_engine_restarts,
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
