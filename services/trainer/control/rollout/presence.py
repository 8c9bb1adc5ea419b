"""The rollout services that there are to publish to, and those that lack the served weights.

No publication waits for a service that was left behind or is away; when it answers again, it is given the served
weights alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from services.trainer.state import TrainState
from services.trainer.weights.lacking import EVERYBODY, NOBODY, EngineIds, Lacking

_FLEET_SECONDS = 2.0
_SILENCE_GAP_SECONDS = 60.0
"""A fleet that was not asked for so long, because a batch was trained, may have answered meanwhile."""
_PRESENT_SECONDS = 5.0
"""How long to wait for services that took part in the last publication, once another one has answered."""
_ABSENT_SECONDS = 0.25
"""The same for services that did not take part."""
_AGAIN_SECONDS = 30.0
"""A service or engines that could not be given the served weights are not offered them sooner."""
_ALIVE = (pb.ENGINE_STATE_READY, pb.ENGINE_STATE_STALE)


class Presence:
    """Asks the services for their fleets."""

    def __init__(self, services: Sequence[RolloutClient], *, away_seconds: float) -> None:
        """`away_seconds`: a wait for a batch ends when all services are silent for longer."""
        self._services = services
        self._away_seconds = away_seconds
        self._took_part: Collection[int] = range(len(services))
        self._not_before: dict[int, float] = {}
        self._silent_from = self._silent_at = -_SILENCE_GAP_SECONDS

    async def present(self, seconds: float) -> Mapping[int, RolloutClient]:
        """The services that have engines for a publication; the only one in any case.

        Waits for the first of them `seconds` at most. Raises Unavailable when none answers.
        """
        if len(self._services) == 1:
            return dict(enumerate(self._services))
        asked = [asyncio.ensure_future(each.get_fleet(deadline_seconds=seconds)) for each in self._services]
        try:
            await _first(asked)
            for numbers, patience in ((self._took_part, _PRESENT_SECONDS), (range(len(asked)), _ABSENT_SECONDS)):
                if numbers:
                    await asyncio.wait([asked[number] for number in numbers], timeout=patience)
            fleets = {number: fleet for number, call in enumerate(asked) if (fleet := _answer(call)) is not None}
        finally:
            for call in asked:
                call.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not fleets:
            raise Unavailable(f"none of {len(asked)} rollout services answered within {seconds:g} s: see their logs")
        alive = [number for number, fleet in fleets.items() if _is_alive(fleet)]
        return {number: self._services[number] for number in alive or fleets}

    def took_part(self, numbers: Collection[int]) -> None:
        """These serve what was published last."""
        self._took_part = set(numbers)

    def rejoined(self, numbers: Collection[int]) -> None:
        """These serve it now, too."""
        self._took_part = {*self._took_part, *numbers}

    def could_not_rejoin(self, numbers: Collection[int]) -> None:
        """They are left alone for a while."""
        if len(self._services) > 1:
            self._not_before |= dict.fromkeys(numbers, time.monotonic() + _AGAIN_SECONDS)

    async def lacking(self, state: TrainState) -> Lacking:
        """The engines that do not serve the policy version: all of some services, or a few of them.

        None of a fleet that does not answer or is in a publication: other calls wait for it. Between two publications
        of an update interval the served weights are gone here: an engine without them waits for the next publication.
        A service whose engines have no memory in their turn has started again, and lacks them all.
        Raises Unavailable once all rollout services have been silent for too long.
        """
        asked = await asyncio.gather(
            *(each.get_fleet(deadline_seconds=_FLEET_SECONDS) for each in self._services), return_exceptions=True
        )
        fleets: dict[int, pb.GetFleetResponse] = {}
        for number, answer in enumerate(asked):
            if isinstance(answer, pb.GetFleetResponse):
                fleets[number] = answer
            elif not isinstance(answer, DeadlineExceeded | Unavailable):
                raise answer
        if not fleets:
            self._endure_silence(next(answer for answer in asked if isinstance(answer, HeadraceError)))
            return NOBODY
        self._silent_at = -_SILENCE_GAP_SECONDS
        if any(fleet.memory_released for fleet in fleets.values()):
            return EVERYBODY
        if not (fleets := {number: fleet for number, fleet in fleets.items() if _has_started(fleet)}):
            return NOBODY
        if all(fleet.policy_version != state.policy_version for fleet in fleets.values()):
            return EVERYBODY
        if state.step != state.policy_version:
            return NOBODY
        return Lacking(engine_ids=self._lacking_of(fleets, state.policy_version))

    def _lacking_of(self, fleets: Mapping[int, pb.GetFleetResponse], policy_version: int) -> EngineIds:
        found: dict[int, tuple[str, ...]] = {}
        for number, fleet in fleets.items():
            stale = [engine.engine_id for engine in fleet.engines if engine.state == pb.ENGINE_STATE_STALE]
            if fleet.publication_id or time.monotonic() < self._not_before.get(number, 0.0):
                continue
            if fleet.policy_version != policy_version and _is_alive(fleet):
                found[number] = ()
            elif stale and fleet.policy_version == policy_version:
                found[number] = tuple(stale)
        return found

    def _endure_silence(self, error: HeadraceError) -> None:
        now = time.monotonic()
        if now - self._silent_at >= _SILENCE_GAP_SECONDS:
            self._silent_from = now
        self._silent_at = now
        if now - self._silent_from > self._away_seconds:
            raise Unavailable(
                f"{error}; nor any call in {now - self._silent_from:.0f} s while a batch was awaited. See its log; "
                "a fleet that takes longer to start needs a larger --start-timeout-seconds"
            ) from error


async def _first(asked: Sequence[asyncio.Future[pb.GetFleetResponse]]) -> None:
    """Returns when one of them has answered, or all have failed."""
    pending = set(asked)
    while pending and all(_answer(call) is None for call in asked):
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def _answer(call: asyncio.Future[pb.GetFleetResponse]) -> pb.GetFleetResponse | None:
    """None as long as there is none. Raises what is no sign of an absence."""
    if not call.done() or isinstance(call.exception(), DeadlineExceeded | Unavailable):
        return None
    return call.result()


def _has_started(fleet: pb.GetFleetResponse) -> bool:
    """False for a service that answers while its first engines start."""
    return any(engine.state != pb.ENGINE_STATE_STARTING for engine in fleet.engines)


def _is_alive(fleet: pb.GetFleetResponse) -> bool:
    """An engine of it can take weights."""
    return any(engine.state in _ALIVE for engine in fleet.engines)
