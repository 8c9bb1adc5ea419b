"""One running publication: its state, its engines, and the tasks that work for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.state import Phase, Plan, PublicationState

# The engines of one publication are asked all at once, and taken out when they fail.
# A collective binds them: when one is gone in the middle of it, the others cannot finish it, and that is not their
# fault. They go on in the next publication; the one that is gone is started again.

# When one engine has failed, the others either finish at once or hang.
STRAGGLER_SECONDS = 10.0

Act = Callable[[Engine], Awaitable[object]]


class Participants:
    """The engines by id, in the order of their ranks."""

    def __init__(self, state: PublicationState, engines: Sequence[Engine], fleet: Fleet) -> None:
        self.engines = {engine.engine_id: engine for engine in engines}
        self._state = state
        self._fleet = fleet
        self._latest: dict[str, asyncio.Task[object]] = {}
        self._incarnations = {engine.engine_id: engine.incarnation for engine in engines}

    @property
    def remaining(self) -> list[Engine]:
        """The engines that still take part."""
        return [self.engines[engine_id] for engine_id in self._state.remaining]

    def takes_part(self, engine: Engine) -> bool:
        """False once another process is in its place. Engines that are given an adapter serve meanwhile."""
        if not self._state.plan.is_adapter:
            return engine.state is EngineState.UPDATING
        is_same = engine.incarnation == self._incarnations[engine.engine_id]
        return is_same and engine.state in (EngineState.READY, EngineState.STALE)

    async def each(self, act: Act) -> None:
        """Takes out those that fail; the others go on. Raises PublicationAborted when none remains."""
        calls = self._ask(act)
        _, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=STRAGGLER_SECONDS)
        self._state.require_open()
        await self._lose_failed(calls)

    async def gather_collective(self, act: Act) -> None:
        """Runs a collective: an engine that is gone ends it for all; one that alone refuses is taken out.

        Raises PublicationAborted at once in the first case: the others hang until the sender leaves the collective.
        """
        calls = self._ask(act)
        _, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if pending and not any(_is_gone(call) for call in calls):
            _, pending = await asyncio.wait(pending, timeout=STRAGGLER_SECONDS)
        self._state.require_open()
        gone = {engine.engine_id: _failure(call) for call, engine in calls.items() if _is_gone(call)}
        for engine_id, why in gone.items():
            await self.lose(engine_id, str(why))
        if gone or pending:
            self._break_off(f"engines lost in a collective: {gone or 'none, but some hang in it'}")
        if all(_failure(call) for call in calls):
            self._break_off(f"every engine refused: {next(_failure(call) for call in calls)}")
        await self._lose_failed(calls)

    async def gather_independent(self, act: Act) -> None:
        """Takes out those that fail, each by its own limit. They do not depend on each other, however slow one is.

        Raises PublicationAborted when every engine refuses: that is the sender's fault, and restarts none of them.
        """
        calls = self._ask(act)
        await asyncio.wait(calls)
        self._state.require_open()
        if all(_failure(call) and not _is_gone(call) for call in calls):
            self._break_off(f"every engine refused: {next(_failure(call) for call in calls)}")
        await self._lose_failed(calls)

    async def lose(self, engine_id: str, why: str) -> None:
        """Takes an engine out and restarts it. Raises PublicationAborted when it was the last one."""
        engine = self.engines[engine_id]
        try:
            self._state.lose(engine_id, why)
        finally:
            if self.takes_part(engine):
                await self._fleet.give_up(engine, why)

    async def failed(self) -> set[str]:
        """Returns the ids of engines that are gone, or do not return from their latest call."""
        if running := [call for call in self._latest.values() if not call.done()]:
            await asyncio.wait(running, timeout=STRAGGLER_SECONDS)
        for call in running:
            call.cancel()
        return {engine_id for engine_id, call in self._latest.items() if not call.done() or _is_gone(call)}

    def _ask(self, act: Act) -> dict[asyncio.Task[object], Engine]:
        calls = {asyncio.create_task(self._done(act, engine)): engine for engine in self.remaining}
        self._latest |= {engine.engine_id: call for call, engine in calls.items()}
        return calls

    async def _done(self, act: Act, engine: Engine) -> object:
        """Raises Unavailable where the engine ended: another process in its place holds none of these weights."""
        if not self.takes_part(engine):
            raise Unavailable("the engine ended during the publication", reason="ENGINE_UNREACHABLE")
        return await act(engine)

    async def _lose_failed(self, calls: Mapping[asyncio.Task[object], Engine]) -> None:
        for call, engine in calls.items():
            if (why := _failure(call)) is not None:
                call.cancel()
                await self.lose(engine.engine_id, why)

    def _break_off(self, why: str) -> None:
        self._state.abort(why)
        self._state.require_open()


def _failure(call: asyncio.Task[object]) -> str | None:
    if not call.done() or call.cancelled():
        return "it did not finish when another engine had failed"
    error = call.exception()
    if error is None:
        return None
    return error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


def _is_gone(call: asyncio.Task[object]) -> bool:
    """True when the call failed without a response."""
    if not call.done():
        return False
    return call.cancelled() or not isinstance(call.exception(), FailedPrecondition | InvalidArgument | None)


@dataclass(frozen=True, slots=True)
class Members:
    """The engines of a publication, in the order of their ranks behind the sender's."""

    world_size: int
    engine_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit."""

    engine_ids: tuple[str, ...]
    weights_digest: str
    lost_engine_ids: tuple[str, ...]
    paused_seconds: float
    busy_share: float | None
    """The engines' busy share of the time since the last commit to all; None for the first, and for a few engines."""


class Publication:
    """A publication with its state, its engines and its tasks."""

    def __init__(self, plan: Plan, engines: Sequence[Engine], members: Members, fleet: Fleet) -> None:
        self.state = PublicationState(plan, members.engine_ids)
        self.participants = Participants(self.state, engines, fleet)
        self.were_ready = {engine.engine_id for engine in engines if engine.state is EngineState.READY}
        self.members = members
        self.deadline = time.monotonic() + plan.deadline_seconds
        self.paused_at: float | None = None
        self.paused_seconds = 0.0
        self.in_session: set[str] = set()
        self.resumed: set[str] = set()
        self.lock = asyncio.Lock()
        self.buckets: dict[int, asyncio.Task[tuple[str, ...]]] = {}
        self.preparing: asyncio.Task[None] | None = None
        self.timer: asyncio.Task[None] | None = None
        self.committing: asyncio.Task[CommitResult] | None = None
        self.cleanup: asyncio.Task[None] | None = None

    @property
    def plan(self) -> Plan:
        return self.state.plan

    @property
    def is_over(self) -> bool:
        """True when it is committed, or aborted with its engines cleaned up."""
        if self.state.phase is Phase.ABORTED:
            return self.cleanup is not None and self.cleanup.done()
        return self.state.phase is Phase.COMMITTED

    def seconds_left(self) -> float:
        """Returns the time until the deadline; at least 0.1 s, so that a call made now fails by its own limit."""
        return max(self.deadline - time.monotonic(), 0.1)

    def end_timer(self) -> None:
        """Cancels the deadline's task."""
        if self.timer is not None:
            self.timer.cancel()
