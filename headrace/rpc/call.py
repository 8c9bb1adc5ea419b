"""Calling: a deadline on everything, the server's error class on this side, and patience while a server restarts.

A call is made again no sooner than its server asked for by RetryInfo.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headrace.errors import DeadlineExceeded, DiskFull, HeadraceError, RetryableError, Unavailable
from headrace.rpc.status import from_rpc_error

_LONGEST_BACKOFF_SECONDS = 2.0


async def call(method: Callable[..., Any], request: Any, *, deadline_seconds: float) -> Any:
    """One unary call. Made again until the deadline while the server is away or its disk full; raises its error."""
    end = time.monotonic() + deadline_seconds
    backoff = 0.05
    last: RetryableError | None = None
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise last or DeadlineExceeded(f"no answer within {deadline_seconds:g} s")
        try:
            return await method(request, timeout=left, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            mapped = _mapped(error, deadline_seconds)
            if isinstance(mapped, DeadlineExceeded) and last is not None:
                raise last from error  # what kept it from answering says more than the clock
            if not isinstance(mapped, Unavailable | DiskFull):
                raise mapped from error
            last = mapped
        backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)
        await asyncio.sleep(min(pause_seconds(last, backoff), max(end - time.monotonic(), 0.0)))


def pause_seconds(error: RetryableError, backoff_seconds: float) -> float:
    """As long as the server asked for, at least; with a random part, so that its callers do not all come at once."""
    return max(backoff_seconds * random.uniform(0.5, 1.0), error.retry_after_seconds * random.uniform(1.0, 1.25))


async def stream(method: Callable[..., Any], request: Any, *, deadline_seconds: float | None) -> AsyncIterator[Any]:
    """A server stream; errors are mapped, nothing is retried. Only an endless watch goes without a deadline."""
    try:
        async for reply in method(request, timeout=deadline_seconds, wait_for_ready=True):
            yield reply
    except grpc.aio.AioRpcError as error:
        raise _mapped(error, deadline_seconds) from error


def _mapped(error: grpc.aio.AioRpcError, deadline_seconds: float | None) -> HeadraceError:
    mapped = from_rpc_error(error)
    if isinstance(mapped, DeadlineExceeded) and deadline_seconds is not None:
        return DeadlineExceeded(f"no answer within {deadline_seconds:g} s: {mapped.message}")
    if error.code() is grpc.StatusCode.CANCELLED:  # not by us, which is no error of gRPC's: the server is ending
        return Unavailable(
            "the server ended before it had answered: try again when it is back", retry_after_seconds=0.0
        )
    return mapped
