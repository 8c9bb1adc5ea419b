"""One running publication: its state, its engines, and the tasks that work for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.participants import Participants
from services.rollout.publication.state import Phase, Plan, PublicationState


@dataclass(frozen=True, slots=True)
class Begun:
    """The participants of a publication."""

    world_size: int
    engine_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit."""

    engine_ids: tuple[str, ...]
    weights_digest: str
    lost_engine_ids: tuple[str, ...]
    paused_seconds: float
    busy_share: float | None
    """The engines' busy share of the time since the last commit to all; None for the first, and for a few engines."""


class Publication:
    """A publication with its state, its engines and its tasks."""

    def __init__(self, plan: Plan, engines: Sequence[Engine], begun: Begun, fleet: Fleet) -> None:
        self.state = PublicationState(plan, begun.engine_ids)
        self.participants = Participants(self.state, engines, fleet)
        self.were_ready = {engine.engine_id for engine in engines if engine.state is EngineState.READY}
        self.begun = begun
        self.deadline = time.monotonic() + plan.deadline_seconds
        self.paused_at: float | None = None
        self.paused_seconds = 0.0
        self.in_session: set[str] = set()
        self.resumed: set[str] = set()
        self.lock = asyncio.Lock()
        self.buckets: dict[int, asyncio.Task[tuple[str, ...]]] = {}
        self.preparing: asyncio.Task[None] | None = None
        self.timer: asyncio.Task[None] | None = None
        self.committing: asyncio.Task[Committed] | None = None
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
