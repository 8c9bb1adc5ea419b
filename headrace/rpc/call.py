"""Calling: a deadline on everything, the server's error class on this side, and patience while a server restarts.

A call is made again no sooner than its server asked for by RetryInfo.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from headrace.errors import DeadlineExceeded, DiskFull, HeadraceError, RetryableError, Unavailable
from headrace.rpc.status import DETAILS_KEY, from_rpc_error

_LONGEST_BACKOFF_SECONDS = 2.0


async def call(method: Callable[..., Any], request: Any, *, deadline_seconds: float, peer: str = "the server") -> Any:
    """One unary call. Made again until the deadline while the server is away or its disk full; raises its error.

    `peer`: who is asked, for the message where nobody answers: "the buffer at host:port".
    """
    end = time.monotonic() + deadline_seconds
    backoff = 0.05
    last: RetryableError | None = None
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise last or DeadlineExceeded(f"{peer} gave no answer within {deadline_seconds:g} s")
        try:
            return await method(request, timeout=left, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            mapped = _mapped(error, deadline_seconds, peer)
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


async def stream(
    method: Callable[..., Any], request: Any, *, deadline_seconds: float | None, peer: str = "the server"
) -> AsyncIterator[Any]:
    """A server stream; errors are mapped, nothing is retried. Only an endless watch goes without a deadline."""
    try:
        async for reply in method(request, timeout=deadline_seconds, wait_for_ready=True):
            yield reply
    except grpc.aio.AioRpcError as error:
        raise _mapped(error, deadline_seconds, peer) from error


def _mapped(error: grpc.aio.AioRpcError, deadline_seconds: float | None, peer: str) -> HeadraceError:
    mapped = from_rpc_error(error)
    if isinstance(mapped, DeadlineExceeded) and deadline_seconds is not None:
        return DeadlineExceeded(f"{peer} gave no answer within {deadline_seconds:g} s: {mapped.message}")
    if isinstance(mapped, Unavailable) and _is_of_the_connection(error):
        return Unavailable(f"{peer} cannot be reached: {mapped.message}", retry_after_seconds=0.0)
    if error.code() is grpc.StatusCode.CANCELLED:  # not by us, which is no error of gRPC's: the server is ending
        return Unavailable(f"{peer} ended before it had answered: try again when it is back", retry_after_seconds=0.0)
    return mapped


def _is_of_the_connection(error: grpc.aio.AioRpcError) -> bool:
    """Said by gRPC on this side: a server of ours says why in the details."""
    trailer: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]  # stubs
    return all(key != DETAILS_KEY for key, _ in trailer)
