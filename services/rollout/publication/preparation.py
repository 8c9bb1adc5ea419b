"""Prepares engines for the first bucket: what the transport needs is done while requests go on, then they pause."""

from __future__ import annotations

import time

from services.rollout.engine.activity import Activity
from services.rollout.publication.publication import Publication
from services.rollout.publication.transport import Inbound


async def prepare(publication: Publication, transport: Inbound, activity: Activity) -> None:
    """Every engine that still takes part is paused and open for weights."""
    plan, participants = publication.plan, publication.participants
    await transport.ready(publication)
    if plan.is_loaded:
        return  # nothing comes that they would have to stand still for
    publication.paused_at = time.monotonic()
    if not plan.engine_ids:
        activity.stand_still()
    await participants.each(lambda engine: engine.client.pause(plan.pause_mode))
    await participants.each(lambda engine: transport.open(publication, engine))
