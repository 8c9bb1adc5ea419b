"""The sending half of a publication: the coordinator of the transaction that the rollout service takes part in.

begin → (senders join; for each bucket: engines receive while senders broadcast) → commit, or abort. A publication that
fails leaves the engines' old version in charge and is tried again with new groups.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, Fenced, GroupGone, HeadraceError, PublicationAborted, Unavailable
from headrace.job.schema.job import PublishSection
from headrace.rpc.log import log
from services.trainer.control.channel import Control
from services.trainer.control.commands import DropGroups, OpenGroups, SendWeights
from services.trainer.control.crew import Crew
from services.trainer.state import TrainState
from services.trainer.weights.canary import Canary
from services.trainer.weights.lacking import EVERYBODY, NOBODY, Lacking

_TRIES = 3
_ASK_AGAIN_SECONDS = 0.005
_FLEET_SECONDS = 2.0
_TRANSPORTS = {"collective": pb.TRANSPORT_COLLECTIVE}
_PAUSE_MODES = {
    "in_place": pb.PAUSE_MODE_IN_PLACE,
    "retract": pb.PAUSE_MODE_RETRACT,
    "abort": pb.PAUSE_MODE_ABORT,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent, in which groups."""

    manifest: pb.Manifest
    groups: list[pb.PublishGroup]
    num_buckets: int


class Publisher:
    """Gives the current weights to all engines."""

    def __init__(
        self, crew: Crew, control: Control, rollout: RolloutClient, config: PublishSection, *, stages: int, backend: str
    ) -> None:
        self._crew = crew
        self._control = control
        self._rollout = rollout
        self._config = config
        self._stages = stages
        self._backend = backend

    async def publish(self, state: TrainState) -> dict[str, float]:
        """Returns once every engine in routing serves `state.step`. Raises the last try's error."""
        for tries_left in reversed(range(_TRIES)):
            try:
                reply = await self._attempt(state)
            except HeadraceError as error:
                if not tries_left or isinstance(error, Fenced):
                    raise
                log.warning("publication_failed", policy_version=state.step, reason=error.reason, error=str(error))
            else:
                log.info("published", policy_version=state.step, engines=len(reply.engine_ids))
                return {
                    "publish/paused_seconds": reply.paused_seconds,
                    "publish/engines": float(len(reply.engine_ids)),
                    "publish/engines_lost": float(len(reply.lost_engine_ids)),
                }
        raise AssertionError("unreachable: the last try returns or raises")

    async def lacking(self, state: TrainState) -> Lacking:
        """Who does not serve its policy version.

        A fleet that does not answer, or is in a publication, is waited for elsewhere. Between two publications of an
        update interval the served weights are gone here: an engine without them waits for the next publication.
        """
        try:
            fleet = await self._rollout.get_fleet(deadline_seconds=_FLEET_SECONDS)
        except (DeadlineExceeded, Unavailable):
            return NOBODY
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
            reply = await self._attempt(state, engine_ids)
        except Fenced:
            raise
        except HeadraceError as error:
            log.warning("rejoin_failed", engines=list(engine_ids), reason=error.reason, error=str(error))
        else:
            log.info("engines_rejoined", policy_version=state.step, engines=list(reply.engine_ids))
            await self._crew.run(DropGroups())  # the group of a few engines serves once

    async def _attempt(self, state: TrainState, engine_ids: Sequence[str] = ()) -> pb.CommitPublishResponse:
        """Raises what ended it, once it is given up."""
        publication_id = f"v{state.step}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._exchange(publication_id, state, engine_ids)
        except GroupGone as error:
            log.info("groups_renewed", why=str(error))
            await self._crew.run(DropGroups())
        except HeadraceError as error:
            await self._give_up(publication_id, str(error))
            raise
        return await self._attempt(state, engine_ids)  # with new groups, which cannot be gone

    async def _exchange(
        self, publication_id: str, state: TrainState, engine_ids: Sequence[str]
    ) -> pb.CommitPublishResponse:
        plan = await self._plan(publication_id)
        canary = await self._canary(publication_id)
        begun = await self._rollout.begin_publish(
            pb.BeginPublishRequest(
                publication_id=publication_id,
                policy_version=state.step,
                manifest=plan.manifest,
                groups=plan.groups,
                backend=self._backend,
                pause_mode=_PAUSE_MODES[self._config.update_weight_pause_mode],
                transport=_TRANSPORTS[self._config.update_weight_transport],
                deadline_seconds=self._config.update_weight_timeout_seconds,
                epoch=state.epoch,
                engine_ids=engine_ids,
            ),
            deadline_seconds=self._config.update_weight_timeout_seconds,
        )
        sending = asyncio.create_task(self._crew.run(SendWeights(publication_id, begun.world_size)))
        offering = asyncio.create_task(self._offer(publication_id, plan.num_buckets))
        answers = asyncio.create_task(self._answers(publication_id))
        try:
            # Either side may fail while the other waits for it: the first failure ends both.
            done, _ = await asyncio.wait({offering, answers}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except HeadraceError:
            self._control.put(f"{publication_id}/aborted", "1")
            raise
        finally:
            offering.cancel()
            answers.cancel()
            await sending
        return await self._rollout.commit_publish(
            publication_id,
            answers.result(),
            canary=canary,
            deadline_seconds=self._config.update_weight_timeout_seconds,
        )

    async def _offer(self, publication_id: str, num_buckets: int) -> None:
        """Asks the engines to receive one bucket after the other."""
        for bucket in range(num_buckets):
            await self._rollout.publish_bucket(
                publication_id, bucket, deadline_seconds=self._config.update_weight_timeout_seconds
            )

    async def _plan(self, publication_id: str) -> Plan:
        await self._crew.run(OpenGroups(publication_id))
        tensors: list[pb.TensorSpec] = []
        groups: list[pb.PublishGroup] = []
        next_bucket = 0
        for stage in range(self._stages):
            fact = await self._fact(f"{publication_id}/stage/{stage}")
            numbers = range(next_bucket, next_bucket + len(fact["buckets"]))
            next_bucket = numbers.stop
            for number, bucket in zip(numbers, fact["buckets"], strict=True):
                tensors += [
                    pb.TensorSpec(name=n, shape=shape, dtype=dtype, bucket=number) for n, shape, dtype in bucket
                ]
            groups.append(
                pb.PublishGroup(
                    name=fact["name"],
                    master_address=fact["host"],
                    master_port=fact["port"],
                    buckets=numbers,
                    joined=fact["joined"],
                )
            )
        return Plan(pb.Manifest(tensors=tensors), groups, next_bucket)

    async def _canary(self, publication_id: str) -> pb.Canary:
        """What the last stage makes of it."""
        canary = Canary(**await self._fact(f"{publication_id}/canary"))
        return canary.pack(self._config.update_weight_canary_tolerance)

    async def _answers(self, publication_id: str) -> dict[str, str]:
        """What engines must hold, once every stage has sent; raises what kept one from it."""
        merged: dict[str, str] = {}
        for stage in range(self._stages):
            answer = await self._fact(f"{publication_id}/sent/{stage}")
            if "error" in answer:
                raise PublicationAborted(f"stage {stage}: {answer['error']}")
            merged |= answer["checksums"]
        return merged

    async def _fact(self, key: str) -> Any:
        """A fact that a sender puts into the control store."""
        end = time.monotonic() + self._config.update_weight_timeout_seconds
        while not self._control.has(key):
            if time.monotonic() > end:
                raise DeadlineExceeded(f"no rank put {key} in time: see the trainer's log for the rank that hangs")
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        return json.loads(self._control.get(key))

    async def _give_up(self, publication_id: str, reason: str) -> None:
        await self._crew.run(DropGroups())
        try:
            await self._rollout.abort_publish(publication_id, reason)
        except HeadraceError as error:
            log.warning("abort_failed", publication_id=publication_id, error=str(error))  # its own deadline ends it
