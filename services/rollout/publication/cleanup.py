"""Cleanup after an aborted publication.

clean ──► as before: engines in routing return to it, STALE ones stay STALE
dirty ──► STALE: they hold a mixture, stay paused with their requests, and wait for the next publication; where they
          generated with it already, their requests end and go on elsewhere
gone, hung, or at odds with what was sent ──► DOWN, and started again
"""

from __future__ import annotations

import asyncio

from headrace.rpc.log import log
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.publication import Publication
from services.rollout.publication.transport import Inbound


async def clean_up(publication: Publication, fleet: Fleet, transport: Inbound) -> None:
    """Returns once every engine is in one of those states."""
    state = publication.state
    log.warning("publication_aborted", publication_id=publication.plan.publication_id, why=state.why_aborted)
    publication.end_timer()
    if publication.preparing is not None:
        publication.preparing.cancel()
    transport.release(publication.plan)
    unwell = await publication.participants.unwell()
    was_sent = publication.committing is not None and not publication.plan.is_loaded
    if was_sent:  # and is something else
        unwell |= publication.participants.engines.keys()
    engines = [e for e in publication.participants.engines.values() if e.state is EngineState.UPDATING]
    ended = await asyncio.gather(
        *(_clean_up_engine(publication, engine, fleet, transport, engine.engine_id in unwell) for engine in engines),
        return_exceptions=True,
    )
    for engine, error in zip(engines, ended, strict=True):
        if isinstance(error, Exception):  # it is DOWN, and the others are cleaned up all the same
            log.error("engine_not_stopped", engine=engine.engine_id, exc_info=error)


async def _clean_up_engine(
    publication: Publication, engine: Engine, fleet: Fleet, transport: Inbound, is_unwell: bool
) -> None:
    if is_unwell:
        await fleet.give_up(engine, f"publication aborted: {publication.state.why_aborted}")
        return
    try:
        await transport.leave(publication.plan, engine)
        await transport.close(publication, engine)
        if engine.engine_id in publication.resumed:
            await engine.client.pause("abort")  # what it made with these weights is made again elsewhere
        if publication.state.dirty or engine.engine_id not in publication.were_ready:
            await fleet.hold_back(engine)
        else:
            await engine.client.resume()
            await fleet.serve(engine, engine.policy_version)
    except Exception as error:  # noqa: BLE001  # whatever it was: an engine that nobody cleans up would be UPDATING until the end
        await fleet.give_up(engine, f"did not come back from an aborted publication: {error}")
