"""Weights that are broadcast: a bucket is offered to the engines while its sender is at it, in one group a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import HeadraceError, PublicationAborted
from services.trainer.control.publication_plan import PublicationPlan
from services.trainer.control.rank_group import RankGroup
from services.trainer.control.rollout.recipients import Recipients
from services.trainer.control.transport.port import Attempt, Offer, Source

_OF_CHECKPOINT = 0
"""The version of the weights in hf_checkpoint."""


class CollectiveTransport:
    """Senders broadcast to the engines. With `keeps` they copy what is served into host memory, to send it again.

    With `hashes` the weights that a run begins with are first compared with those that engines have loaded themselves,
    and broadcast only if they differ.
    """

    def __init__(self, ranks: RankGroup, *, seconds: float, keeps: bool, hashes: bool) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._keeps = keeps
        self._made_plan: PublicationPlan | None = None
        self._may_be_loaded = hashes
        self._loaded: dict[str, str] | None = None

    async def prepare(self, attempt: Attempt, services: Collection[int]) -> Offer:
        """The senders listen."""
        plan = await self._plan()
        if self._may_be_loaded and attempt.source is Source.NEW and attempt.policy_version == _OF_CHECKPOINT:
            self._loaded = await self._ranks.hash_weights(deadline_seconds=self._seconds)
            return Offer(pb.TRANSPORT_LOADED, plan.manifest)
        self._may_be_loaded = False
        groups = {
            service: plan.groups(await self._ranks.open_groups(service, deadline_seconds=self._seconds))
            for service in services
        }
        return Offer(pb.TRANSPORT_COLLECTIVE, plan.manifest, groups)

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        """Senders join their groups and broadcast, while engines are asked to receive."""
        if self._loaded is not None:
            return self._loaded
        sending = asyncio.create_task(
            self._ranks.send_weights(
                attempt.publication_id,
                {service: reply.world_size for service, reply in begun.items()},
                kept=attempt.source is Source.BEFORE,
                deadline_seconds=self._seconds,
            )
        )
        num_buckets = (await self._plan()).num_buckets
        offering = asyncio.create_task(self._offer(attempt.publication_id, recipients, num_buckets))
        try:
            # Either side may fail while the other waits for it: the first failure ends both.
            done, _ = await asyncio.wait({offering, sending}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except HeadraceError:
            self._ranks.abort(attempt.publication_id)
            raise
        finally:
            offering.cancel()
            with suppress(HeadraceError):  # raised above, or what the abort brought
                sent = await sending
        for service, why in sent.left.items():
            recipients.leave(service, PublicationAborted(why))
        recipients.require_any()
        return sent.checksums

    async def accept(self, attempt: Attempt) -> bool:
        self._may_be_loaded, self._loaded = False, None
        if self._keeps:
            await self._ranks.keep_weights()
        return self._keeps

    async def rejoined(self, services: Collection[int]) -> None:
        await self._ranks.drop_groups(services)  # the group of a few engines serves once

    async def leave(self, services: Collection[int]) -> None:
        await self._ranks.drop_groups(services)

    async def drop(self, services: Collection[int]) -> bool:
        """True when engines had loaded other weights than the run begins with: they are broadcast then."""
        had_loaded = self._loaded is not None
        self._may_be_loaded, self._loaded = False, None
        if not had_loaded:
            await self._ranks.drop_groups(services)
        return had_loaded

    async def _offer(self, publication_id: str, recipients: Recipients, num_buckets: int) -> None:
        """Asks engines to receive one bucket after the other; senders go on without a service that fails."""
        for bucket in range(num_buckets):
            await recipients.each(partial(self._offer_one, publication_id, bucket))
            for service in recipients.left:
                self._ranks.abort(publication_id, service)

    async def _offer_one(self, publication_id: str, bucket: int, _: int, client: RolloutClient) -> None:
        await client.publish_bucket(publication_id, bucket, deadline_seconds=self._seconds)

    async def _plan(self) -> PublicationPlan:
        """Made for the first publication: a large model has tens of thousands of tensors."""
        if self._made_plan is None:
            self._made_plan = PublicationPlan.of(await self._ranks.describe_weights(deadline_seconds=self._seconds))
        return self._made_plan
