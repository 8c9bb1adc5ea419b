"""Asks engines for their load and tells the producer how many groups may be in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.background import kept_running
from headrace.errors import HeadraceError
from headrace.rpc.log import log
from services.rollout.admission.groups_limit import GroupsLimit
from services.rollout.engine.answers.load import EngineLoad
from services.rollout.engine.fleet import Engine, EngineState

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class LoadWatch:
    """States: built → started → stopped. `groups_in_flight` is asked, and `changed` told the limit, at each look."""

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        limit: GroupsLimit,
        groups_in_flight: Callable[[], int],
        changed: Callable[[int], None],
        ended: Callable[[str], None],
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._engines = engines
        self._limit = limit
        self._groups_in_flight = groups_in_flight
        self._changed = changed
        self._ended = ended
        self._look_seconds = look_seconds
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(kept_running("watch the engines' load", self._look_for_ever, self._ended))

    async def stop(self) -> None:
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            await self.look()

    async def look(self) -> None:
        """Reads every engine in routing. One that does not answer says nothing, and none at all changes nothing."""
        serving = [engine for engine in self._engines() if engine.state is EngineState.READY]
        answers = await asyncio.gather(*(_load_of(engine) for engine in serving))
        before = self._limit.now
        now = self._limit.read([load for load in answers if load], self._groups_in_flight())
        if now != before:
            log.info("groups_limit_changed", before=before, now=now, most=self._limit.most)
            self._changed(now)


async def _load_of(engine: Engine) -> EngineLoad | None:
    try:
        return await engine.client.load(seconds=_ANSWER_SECONDS)
    except HeadraceError as error:
        log.info("engine_load_unknown", engine=engine.engine_id, error=error.message)
        return None
