"""The sending half of a publication: the coordinator of the transaction that the rollout services take part in.

begin → (the transport brings the weights to the engines) → commit, or abort. A publication that fails leaves the
engines' old version in charge and is tried again from the start. When all tries failed, engines may hold a mixture:
they are given the version that was served before, if the transport still has it, and the error ends the run.

On devices that are shared, engines have them once the transport has all that it needs of the ranks.

With several rollout services, each commits on its own. The version is published when all that still answer have
committed it. A service that fails, refuses the weights or hangs is left behind. No publication waits for it; when it
answers again, it alone is given the served weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import BaseGone, DeadlineExceeded, Fenced, GroupGone, HeadraceError, Unavailable
from headrace.job.schema.run import PublishSection
from headrace.publication import Probe
from headrace.rpc.log import log
from services.trainer.control.ranks import RankGroup
from services.trainer.control.senders import Probed
from services.trainer.control.transport import Attempt, Offer, Recipients, Source, Straggler, Transport
from services.trainer.control.worker import RankWorker
from services.trainer.loop import Devices
from services.trainer.state import ALL_STALE, NONE_STALE, EngineIds, StaleEngines, TrainState

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

    async def stale_engines(self, state: TrainState) -> StaleEngines:
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
            return NONE_STALE
        self._silent_at = -_SILENCE_GAP_SECONDS
        if any(fleet.memory_released for fleet in fleets.values()):
            return ALL_STALE
        if not (fleets := {number: fleet for number, fleet in fleets.items() if _has_started(fleet)}):
            return NONE_STALE
        if all(fleet.policy_version != state.policy_version for fleet in fleets.values()):
            return ALL_STALE
        if state.step != state.policy_version:
            return NONE_STALE
        return StaleEngines(engine_ids=self._stale_of(fleets, state.policy_version))

    def _stale_of(self, fleets: Mapping[int, pb.GetFleetResponse], policy_version: int) -> EngineIds:
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


_TRIES = 3
_PAUSE_MODES = {
    "in_place": pb.PAUSE_MODE_IN_PLACE,
    "retract": pb.PAUSE_MODE_RETRACT,
    "abort": pb.PAUSE_MODE_ABORT,
}


@dataclass(frozen=True, slots=True)
class Version:
    """Weights by the number of their step, and what engines compute with them."""

    policy_version: int
    probe: Probed


@dataclass(frozen=True, slots=True)
class _Published:
    """The answers of the services that serve it, by their numbers."""

    attempt: Attempt
    replies: Mapping[int, pb.CommitPublishResponse]

    @property
    def num_engines(self) -> int:
        return sum(len(reply.engine_ids) for reply in self.replies.values())


class Publisher:
    """Gives the current weights to all engines."""

    def __init__(
        self,
        ranks: RankGroup[RankWorker],
        services: Sequence[RolloutClient],
        transport: Transport,
        config: PublishSection,
        *,
        backend: str,
        away_seconds: float,
        devices: Devices,
    ) -> None:
        """Rollout services that are silent for more than `away_seconds` while a batch is awaited end the wait."""
        self._ranks = ranks
        self._services = services
        self._presence = Presence(services, away_seconds=away_seconds)
        self._transport = transport
        self._config = config
        self._seconds = config.update_weight_timeout_seconds
        self._backend = backend
        self._devices = devices
        self._before: Version | None = None
        self._served: Version | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def publish(self, state: TrainState) -> dict[str, float]:
        """Returns once every engine in routing serves `state.step`, of all services that were not left behind.

        Raises the last try's error, once engines serve the version before it again.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                version = await self._current(state)
                published = await self._attempt(version, state.epoch, Source.NEW, await self._present())
            except HeadraceError as error:
                if isinstance(error, Fenced):
                    raise
                if not tries_left:
                    await self._roll_back(state)
                    raise
                log.warning("publication_failed", policy_version=state.step, reason=error.reason, error=str(error))
            else:
                log.info("published", policy_version=state.step, engines=published.num_engines)
                self._presence.took_part(published.replies)
                self._served = version
                if await self._transport.accept(published.attempt, _digests(published)):
                    self._before = version
                return _figures(published, len(self._services))
        raise AssertionError("unreachable: the last try returns or raises")

    async def stale_engines(self, state: TrainState) -> StaleEngines:
        """The engines that do not serve the policy version (`Presence`)."""
        return await self._presence.stale_engines(state)

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None:
        """Gives the served weights to the engines that came back without them; the others do not notice.

        Those that fail again are left to a later time, or to the next publication.
        """
        ids = {number: list(some) for number, some in engine_ids.items()}
        try:
            served = self._served or await self._current(state)
            published = await self._attempt(served, state.epoch, Source.SERVED, engine_ids)
        except Fenced:
            raise
        except HeadraceError as error:
            self._presence.could_not_rejoin(engine_ids)
            log.warning("rejoin_failed", engines=ids, reason=error.reason, error=str(error))
        else:
            self._presence.rejoined(published.replies)
            self._presence.could_not_rejoin(engine_ids.keys() - published.replies.keys())
            log.info("engines_rejoined", policy_version=state.step, engines=_engines(published))
            await self._transport.rejoined(_digests(published))

    async def _present(self) -> EngineIds:
        return dict.fromkeys(await self._presence.present(self._seconds), ())

    async def _roll_back(self, state: TrainState) -> None:
        """Gives engines the version before; what keeps them from it is logged: the error that led here says more."""
        if self._before is None:
            return
        before = self._before.policy_version
        for _ in range(_TRIES):
            try:
                await self._attempt(self._before, state.epoch, Source.BEFORE, await self._present())
            except HeadraceError as error:
                log.error("rollback_failed", policy_version=before, reason=error.reason, error=str(error))
                if isinstance(error, Fenced):
                    return
            else:
                log.warning("rolled_back", policy_version=before, instead_of=state.step)
                return

    async def _attempt(self, version: Version, epoch: int, source: Source, whom: EngineIds) -> _Published:
        """Raises what ended it, once it is given up."""
        attempt = Attempt.of(version.policy_version, epoch, source)
        recipients = Recipients({number: self._services[number] for number in whom})
        try:
            replies = await self._exchange(attempt, version.probe, recipients, whom)
        except HeadraceError as error:
            goes_another_way = await self._transport.drop(list(whom))
            await self._abort(attempt, whom, str(error))
            if isinstance(error, Fenced) or not goes_another_way:
                raise
            log.info("weights_are_sent", why=str(error))
            return await self._attempt(version, epoch, source, whom)  # another way: once
        return _Published(attempt, replies)

    async def _exchange(
        self, attempt: Attempt, probe: Probed, recipients: Recipients, whom: EngineIds
    ) -> Mapping[int, pb.CommitPublishResponse]:
        offer = await self._transport.prepare(attempt, list(whom))
        await self._devices.give()

        async def begin(number: int, client: RolloutClient) -> pb.BeginPublishResponse:
            try:
                return await self._begin(attempt, offer, number, whom[number])
            except GroupGone as error:
                log.info("groups_renewed", why=str(error))
                await self._transport.leave([number])
                renewed = await self._transport.prepare(attempt, [number])
                return await self._begin(attempt, renewed, number, whom[number])

        async def commit(_: int, client: RolloutClient) -> pb.CommitPublishResponse:
            return await client.commit_publish(
                attempt.publication_id,
                checksums,
                probe=Probe(probe.tokens, probe.log_probs, self._config.update_weight_probe_tolerance),
                deadline_seconds=self._seconds,
            )

        begun = await recipients.each(begin)
        if gone := next((error for error in recipients.left.values() if isinstance(error, BaseGone)), None):
            raise gone  # all are sent the whole
        checksums = await self._transport.deliver(attempt, recipients, begun)
        complete = set(recipients.remaining)
        replies = await recipients.each(commit, is_slow_alike=False)
        if recipients.left:
            await self._leave_behind(attempt, recipients.left, complete)
        return replies

    async def _begin(
        self, attempt: Attempt, offer: Offer, number: int, engine_ids: Sequence[str]
    ) -> pb.BeginPublishResponse:
        request = pb.BeginPublishRequest(
            publication_id=attempt.publication_id,
            policy_version=attempt.policy_version,
            manifest=offer.manifest,
            groups=offer.groups.get(number, ()),
            backend=self._backend,
            pause_mode=_PAUSE_MODES[self._config.update_weight_pause_mode],
            transport=offer.transport,
            deadline_seconds=self._seconds,
            disk_path=offer.disk_path,
            delta=offer.deltas.get(number),
            epoch=attempt.epoch,
            engine_ids=engine_ids,
        )
        return await self._services[number].begin_publish(request, deadline_seconds=self._seconds)

    async def _current(self, state: TrainState) -> Version:
        await self._devices.take()
        (probe,) = await self._ranks.gather(self._seconds, RankWorker.probe)
        return Version(state.step, probe)

    async def _leave_behind(
        self, attempt: Attempt, left: Mapping[int, HeadraceError], complete: Collection[int]
    ) -> None:
        """The services that failed give the publication up, but not those that only commit slowly."""
        for number, error in left.items():
            log.warning(
                "service_left_behind",
                service=number,
                policy_version=attempt.policy_version,
                reason=error.reason,
                error=str(error),
            )
        await self._transport.leave(list(left))
        slow = {number for number in complete if isinstance(left.get(number), Straggler)}
        aborting = asyncio.create_task(self._abort(attempt, left.keys() - slow, "this rollout service was left behind"))
        self._aborting.add(aborting)  # nobody waits for it: a service that is gone is asked until the call's deadline
        aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, attempt: Attempt, numbers: Collection[int], reason: str) -> None:
        async def abort(number: int) -> None:
            try:
                await self._services[number].abort_publish(attempt.publication_id, reason)
            except HeadraceError as error:  # its own deadline ends it
                log.warning("abort_failed", publication_id=attempt.publication_id, error=str(error))

        await asyncio.gather(*map(abort, numbers))


def _engines(published: _Published) -> list[str]:
    return [engine_id for reply in published.replies.values() for engine_id in reply.engine_ids]


def _digests(published: _Published) -> dict[int, str]:
    return {number: reply.weights_digest for number, reply in published.replies.items()}


def _figures(published: _Published, num_services: int) -> dict[str, float]:
    replies = published.replies.values()
    figures = {
        "publish/paused_seconds": max(reply.paused_seconds for reply in replies),
        "publish/engines": float(published.num_engines),
        "publish/engines_lost": float(sum(len(reply.lost_engine_ids) for reply in replies)),
    }
    if num_services > 1:
        figures["publish/services"] = float(len(replies))
        figures["publish/services_left"] = float(num_services - len(replies))
    busy = [(reply.busy_share, max(1, len(reply.engine_ids))) for reply in replies if reply.HasField("busy_share")]
    if num_engines := sum(count for _, count in busy):
        figures["busy/engines"] = sum(share * count for share, count in busy) / num_engines
    return figures
