"""A watch that goes on after its server was away: it is asked for again from where its reader has come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeVar

import grpc

from headrace.errors import Unavailable
from headrace.rpc.call import DEFAULT_DEADLINE_SECONDS
from headrace.rpc.retry import Backoff

T = TypeVar("T", covariant=True)


class StreamCall(Protocol[T]):
    """One call of a stream, from where its reader has come to."""

    def __call__(self, *, deadline_seconds: float | None) -> AsyncIterator[T]:
        """Raises Unavailable where the server ends."""


async def resumed(
    channel: grpc.aio.Channel,
    ask: StreamCall[T],
    *,
    deadline_seconds: float | None = None,
    away_seconds: float = DEFAULT_DEADLINE_SECONDS,
) -> AsyncGenerator[T]:
    """The messages of `ask`, which is called again after each Unavailable.

    Raises that error once the server has been away for `away_seconds`, and every other one at once.
    """
    loop = asyncio.get_running_loop()
    end = None if deadline_seconds is None else loop.time() + deadline_seconds
    away_since: float | None = None
    backoff = Backoff()
    while True:
        try:
            async for message in ask(deadline_seconds=None if end is None else max(end - loop.time(), 0.0)):
                away_since = None
                backoff.reset()
                yield message
            return
        except Unavailable as error:
            away_since = away_since or loop.time()
            until = away_since + away_seconds if end is None else min(away_since + away_seconds, end)
            await backoff.sleep(error, at_most=until - loop.time())
            try:
                async with asyncio.timeout_at(until):
                    await channel.channel_ready()
            except TimeoutError:
                raise error from None
