"""The sending half of a publication: the coordinator of the transaction that the rollout service takes part in.

begin → (the transport brings the weights to the engines) → commit, or abort. A publication that fails leaves the
engines' old version in charge and is tried again from the start. When all tries failed, engines may hold a mixture:
they are given the version that was served before, if the transport still has it, and the error ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, Fenced, GroupGone, HeadraceError, Unavailable
from headrace.job.schema.run import PublishSection
from headrace.probe import Probe
from headrace.rpc.log import log
from services.trainer.control.messages import Probed
from services.trainer.control.rank_group import RankGroup
from services.trainer.control.transport.port import Attempt, Source, Transport
from services.trainer.state import TrainState
from services.trainer.weights.lacking import EVERYBODY, NOBODY, Lacking

_TRIES = 3
_FLEET_SECONDS = 2.0
_SILENCE_GAP_SECONDS = 60.0
"""A fleet that was not asked for so long, because a batch was trained, may have answered meanwhile."""
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


class Publisher:
    """Gives the current weights to all engines."""

    def __init__(
        self,
        ranks: RankGroup,
        rollout: RolloutClient,
        transport: Transport,
        config: PublishSection,
        *,
        backend: str,
        away_seconds: float,
    ) -> None:
        """A rollout service that is silent for more than `away_seconds` while a batch is awaited ends the wait."""
        self._ranks = ranks
        self._rollout = rollout
        self._transport = transport
        self._config = config
        self._seconds = config.update_weight_timeout_seconds
        self._backend = backend
        self._away_seconds = away_seconds
        self._before: Version | None = None
        self._silent_from = self._silent_at = -_SILENCE_GAP_SECONDS

    async def publish(self, state: TrainState) -> dict[str, float]:
        """Returns once every engine in routing serves `state.step`.

        Raises the last try's error, once engines serve the version before it again.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                version = await self._current(state)
                attempt, reply = await self._attempt(version, state.epoch, Source.NEW)
            except HeadraceError as error:
                if isinstance(error, Fenced):
                    raise
                if not tries_left:
                    await self._roll_back(state)
                    raise
                log.warning("publication_failed", policy_version=state.step, reason=error.reason, error=str(error))
            else:
                log.info("published", policy_version=state.step, engines=len(reply.engine_ids))
                if await self._transport.accept(attempt):
                    self._before = version
                return _figures(reply)
        raise AssertionError("unreachable: the last try returns or raises")

    async def lacking(self, state: TrainState) -> Lacking:
        """The engines that do not serve the policy version.

        None of a fleet that does not answer or is in a publication: other calls wait for it. Between two publications
        of an update interval the served weights are gone here: an engine without them waits for the next publication.
        Raises Unavailable once the rollout service has been silent for too long.
        """
        try:
            fleet = await self._rollout.get_fleet(deadline_seconds=_FLEET_SECONDS)
        except (DeadlineExceeded, Unavailable) as error:
            self._endure_silence(error)
            return NOBODY
        self._silent_at = -_SILENCE_GAP_SECONDS
        if fleet.policy_version != state.policy_version:
            return EVERYBODY
        if fleet.publication_id or state.step != state.policy_version:
            return NOBODY
        stale = [engine.engine_id for engine in fleet.engines if engine.state == pb.ENGINE_STATE_STALE]
        return Lacking(engine_ids=tuple(stale))

    async def rejoin(self, state: TrainState, engine_ids: Sequence[str]) -> None:
        """Gives the served weights to the engines that came back without them; the others do not notice.

        One that fails again is left to the next time, or to the next publication.
        """
        try:
            _, reply = await self._attempt(await self._current(state), state.epoch, Source.SERVED, engine_ids)
        except Fenced:
            raise
        except HeadraceError as error:
            log.warning("rejoin_failed", engines=list(engine_ids), reason=error.reason, error=str(error))
        else:
            log.info("engines_rejoined", policy_version=state.step, engines=list(reply.engine_ids))
            await self._transport.rejoined()

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

    async def _roll_back(self, state: TrainState) -> None:
        """Gives engines the version before; what keeps them from it is logged: the error that led here says more."""
        if self._before is None:
            return
        before = self._before.policy_version
        for _ in range(_TRIES):
            try:
                await self._attempt(self._before, state.epoch, Source.BEFORE)
            except HeadraceError as error:
                log.error("rollback_failed", policy_version=before, reason=error.reason, error=str(error))
                if isinstance(error, Fenced):
                    return
            else:
                log.warning("rolled_back", policy_version=before, instead_of=state.step)
                return

    async def _attempt(
        self, version: Version, epoch: int, source: Source, engine_ids: Sequence[str] = ()
    ) -> tuple[Attempt, pb.CommitPublishResponse]:
        """Raises what ended it, once it is given up."""
        attempt = Attempt.of(version.policy_version, epoch, source)
        try:
            return attempt, await self._exchange(attempt, version.probe, engine_ids)
        except GroupGone as error:
            log.info("groups_renewed", why=str(error))
            await self._transport.drop()
        except HeadraceError as error:
            goes_another_way = await self._give_up(attempt.publication_id, str(error))
            if isinstance(error, Fenced) or not goes_another_way:
                raise
            log.info("weights_are_sent", why=str(error))
        return await self._attempt(version, epoch, source, engine_ids)  # with new groups, or another way: once

    async def _exchange(self, attempt: Attempt, probe: Probed, engine_ids: Sequence[str]) -> pb.CommitPublishResponse:
        offer = await self._transport.prepare(attempt)
        begun = await self._rollout.begin_publish(
            pb.BeginPublishRequest(
                publication_id=attempt.publication_id,
                policy_version=attempt.policy_version,
                manifest=offer.manifest,
                groups=offer.groups,
                backend=self._backend,
                pause_mode=_PAUSE_MODES[self._config.update_weight_pause_mode],
                transport=offer.transport,
                deadline_seconds=self._seconds,
                disk_path=offer.disk_path,
                epoch=attempt.epoch,
                engine_ids=engine_ids,
            ),
            deadline_seconds=self._seconds,
        )
        checksums = await self._transport.deliver(attempt, begun)
        return await self._rollout.commit_publish(
            attempt.publication_id,
            checksums,
            probe=Probe(probe.tokens, probe.log_probs, self._config.update_weight_probe_tolerance),
            deadline_seconds=self._seconds,
        )

    async def _current(self, state: TrainState) -> Version:
        return Version(state.step, await self._ranks.probe(deadline_seconds=self._seconds))

    async def _give_up(self, publication_id: str, reason: str) -> bool:
        goes_another_way = await self._transport.drop()
        try:
            await self._rollout.abort_publish(publication_id, reason)
        except HeadraceError as error:
            log.warning("abort_failed", publication_id=publication_id, error=str(error))  # its own deadline ends it
        return goes_another_way


def _figures(reply: pb.CommitPublishResponse) -> dict[str, float]:
    figures = {
        "publish/paused_seconds": reply.paused_seconds,
        "publish/engines": float(len(reply.engine_ids)),
        "publish/engines_lost": float(len(reply.lost_engine_ids)),
    }
    return figures | ({"busy/engines": reply.busy_share} if reply.HasField("busy_share") else {})
