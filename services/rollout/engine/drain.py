"""Frees an engine from its requests before it ends: they finish in time, or end where they are."""

from __future__ import annotations

import asyncio
import time

from headrace.errors import HeadraceError
from headrace.rpc.log import log
from services.rollout.engine.engine import Engine

_POLL_SECONDS = 0.5
_TIMES_FREE = 2
"""An engine notes its requests every few steps, so a count of 0 may be older than the latest request."""
_ENDING_SECONDS = 5.0
"""Responses that were aborted have so long to reach their callers."""


async def drain(engine: Engine, seconds: float) -> None:
    """Returns once an engine out of routing has no requests; those left after `seconds` end with the tokens so far.

    An engine that does not answer has none that could be saved.
    """
    if engine.process is None or engine.process.exit_code is not None:
        return
    for within in (seconds, _ENDING_SECONDS):
        try:
            await _finished(engine, within)
            await engine.client.abort_all()  # after the first time also for one that was on its way, uncounted
        except HeadraceError as error:
            log.warning("engine_not_drained", engine=engine.engine_id, error=error.message)


async def _finished(engine: Engine, seconds: float) -> None:
    end, times_free = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        times_free = 0 if await engine.client.num_requests() else times_free + 1
        if times_free == _TIMES_FREE:
            return
        await asyncio.sleep(_POLL_SECONDS)
