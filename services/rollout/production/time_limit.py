"""Ends one request at the engines when its time is over, so that it answers with the tokens that it has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from headrace.errors import HeadraceError
from headrace.rpc.log import log
from services.rollout.engine.fleet import Engine, EngineState

GRACE_SECONDS = 10.0
"""The time that an engine may take to answer a request that is ended."""
_AGAIN_SECONDS = 1.0
_GENERATING = (EngineState.READY, EngineState.LEAVING)

EndRequest = Callable[[str], Awaitable[None]]


def request_ender(engines: Callable[[], Sequence[Engine]]) -> EndRequest:
    """Returns a function that ends the request of an id, at whichever engine the router has sent it to."""

    async def end(request_id: str) -> None:
        serving = (engine for engine in engines() if engine.state in _GENERATING)
        ends = (engine.client.abort(request_id) for engine in serving)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, HeadraceError):
                log.info("request_not_ended", request_id=request_id, error=result.message)

    return end


@contextlib.asynccontextmanager
async def ended_after(seconds: float, request_id: str, end: EndRequest) -> AsyncIterator[None]:
    """Ends the request after `seconds` of the block, again and again: it may still be on its way to an engine."""

    async def end_it() -> None:
        await asyncio.sleep(seconds)
        while True:
            await end(request_id)
            await asyncio.sleep(_AGAIN_SECONDS)

    ending = asyncio.create_task(end_it())
    try:
        yield
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
