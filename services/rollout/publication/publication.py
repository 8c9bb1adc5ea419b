"""One publication at work: its transaction, the engines in it, and what runs for it."""

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
    """Who takes part."""

    world_size: int
    engine_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What is served now."""

    engine_ids: tuple[str, ...]
    weights_digest: str
    lost_engine_ids: tuple[str, ...]
    paused_seconds: float


class Publication:
    """A transaction with its engines and the work that runs for it."""

    def __init__(self, plan: Plan, engines: Sequence[Engine], begun: Begun, fleet: Fleet) -> None:
        self.state = PublicationState(plan, begun.engine_ids)
        self.participants = Participants(self.state, engines, fleet)
        self.were_ready = {engine.engine_id for engine in engines if engine.state is EngineState.READY}
        self.begun = begun
        self.deadline = time.monotonic() + plan.deadline_seconds
        self.paused_at: float | None = None
        self.in_session: set[str] = set()
        self.lock = asyncio.Lock()
        self.buckets: dict[int, asyncio.Task[tuple[str, ...]]] = {}
        self.preparing: asyncio.Task[None] | None = None
        self.timer: asyncio.Task[None] | None = None
        self.committing: asyncio.Task[Committed] | None = None
        self.settling: asyncio.Task[None] | None = None

    @property
    def plan(self) -> Plan:
        """What it brings."""
        return self.state.plan

    @property
    def is_over(self) -> bool:
        """Committed, or aborted and its engines have settled."""
        if self.state.phase is Phase.ABORTED:
            return self.settling is not None and self.settling.done()
        return self.state.phase is Phase.COMMITTED

    def seconds_left(self) -> float:
        """Until the deadline; a moment at least, so that a call made now fails by its own limit."""
        return max(self.deadline - time.monotonic(), 0.1)

    def end_timer(self) -> None:
        """The deadline does not matter any more."""
        if self.timer is not None:
            self.timer.cancel()
