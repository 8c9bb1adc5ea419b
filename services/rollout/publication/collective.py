"""Weights that are broadcast: engines join the senders' groups and receive bucket by bucket, in an update session."""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine
from services.rollout.publication.groups import WeightGroups
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import GroupPlan, Plan


class CollectiveInbound:
    """Knows which engines are in which group."""

    def __init__(self) -> None:
        self._groups = WeightGroups()

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        self._groups.require_whole(plan.groups, engines)

    async def ready(self, publication: Publication) -> None:
        """Every engine that still takes part joins every group."""
        if not publication.plan.engine_ids:
            await self._leave_old_groups(publication)
        for group in publication.plan.groups:
            if not group.joined:
                await self._join(publication, group)

    async def open(self, publication: Publication, engine: Engine) -> None:
        await engine.client.begin_weight_update()
        publication.in_session.add(engine.engine_id)

    async def receive(self, publication: Publication, bucket: int) -> None:
        group, tensors = publication.plan.group_of(bucket), publication.plan.buckets[bucket]
        await publication.participants.together(
            lambda e: e.client.receive_bucket(group.name, tensors, seconds=publication.seconds_left())
        )

    async def close(self, publication: Publication, engine: Engine) -> None:
        if engine.engine_id in publication.in_session:
            await engine.client.end_weight_update()
            publication.in_session.discard(engine.engine_id)

    async def finish(self, publication: Publication) -> None:
        """Leaves the groups of a publication for a few engines: the next publication is for all of them again."""
        if publication.plan.engine_ids:
            self.release(publication.plan)
            for engine in publication.participants.remaining:
                await self.leave(publication.plan, engine)

    def release(self, plan: Plan) -> None:
        self._groups.discard(plan.group_names)

    async def leave(self, plan: Plan, engine: Engine) -> None:
        await self._groups.leave(engine, plan.group_names)

    async def _join(self, publication: Publication, group: GroupPlan) -> None:
        engines = list(publication.participants.engines.values())
        offsets: dict[str, int] = {}
        rank = 1
        for engine in engines:
            offsets[engine.engine_id] = rank
            rank += engine.tensor_parallel_size

        async def join(engine: Engine) -> None:
            place = GroupJoin(
                name=group.name,
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=offsets[engine.engine_id],
                world_size=publication.begun.world_size,
                backend=publication.plan.backend,
            )
            await self._groups.join(engine, place, seconds=publication.seconds_left())

        await publication.participants.together(join)
        self._groups.formed(group.name, engines)

    async def _leave_old_groups(self, publication: Publication) -> None:
        """Leaves the groups that the trainer's plan does not name any more."""
        if gone := self._groups.others(publication.plan.groups):
            await publication.participants.each(lambda engine: self._groups.leave(engine, gone))
            self._groups.discard(gone)
