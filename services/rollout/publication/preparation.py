"""Prepares engines for the first bucket: they join the sender's groups while requests go on, then pause."""

from __future__ import annotations

import time

from services.rollout.engine.activity import Activity
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine
from services.rollout.publication.groups import WeightGroups
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import GroupPlan


async def prepare(publication: Publication, groups: WeightGroups, activity: Activity) -> None:
    """Every engine that still takes part is in every group, paused, and in an update session."""
    plan, participants = publication.plan, publication.participants
    if not plan.engine_ids:
        await _leave_old_groups(publication, groups)
    for group in plan.groups:
        if not group.joined:
            await _join(publication, group, groups)
    publication.paused_at = time.monotonic()
    if not plan.engine_ids:
        activity.stand_still()
    await participants.each(lambda engine: engine.client.pause(plan.pause_mode))

    async def open_session(engine: Engine) -> None:
        await engine.client.begin_weight_update()
        publication.in_session.add(engine.engine_id)

    await participants.each(open_session)


async def _join(publication: Publication, group: GroupPlan, groups: WeightGroups) -> None:
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
        await groups.join(engine, place, seconds=publication.seconds_left())

    await publication.participants.together(join)
    groups.formed(group.name, engines)


async def _leave_old_groups(publication: Publication, groups: WeightGroups) -> None:
    """Leaves the groups that the trainer's plan does not name any more."""
    if gone := groups.others(publication.plan.groups):
        await publication.participants.each(lambda engine: groups.leave(engine, gone))
        groups.forget(gone)
