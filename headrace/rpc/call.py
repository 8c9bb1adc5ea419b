"""Calling: a deadline on everything, the server's error class on this side, and patience while a server restarts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.rpc.retry import retry_until
from headrace.rpc.status import details_of, from_rpc_error

DEFAULT_DEADLINE_SECONDS = 300.0
"""As long as services wait for one another while one of them is restarted."""


async def call(method: Callable[..., Any], request: Any, *, deadline_seconds: float, peer: str = "the server") -> Any:
    """One unary call. Made again until the deadline while the server is away or its disk full; raises its error.

    `peer`: who is asked, for the message where nobody answers: "the buffer at host:port".
    """

    async def attempt(left: float) -> Any:
        return await call_once(method, request, deadline_seconds=left, peer=peer)

    return await retry_until(time.monotonic() + deadline_seconds, attempt)


async def call_once(
    method: Callable[..., Any], request: Any, *, deadline_seconds: float, peer: str = "the server"
) -> Any:
    """One unary call. It waits for a server that cannot be reached, and raises what the server answers."""
    try:
        return await method(request, timeout=deadline_seconds, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise _mapped(error, deadline_seconds, peer) from error


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
        return DeadlineExceeded(f"{peer} gave no answer within {round(deadline_seconds, 2):g} s: {mapped.message}")
    if isinstance(mapped, Unavailable) and details_of(error) is None:
        return Unavailable(f"{peer} cannot be reached: {mapped.message}", retry_after_seconds=0.0)
    if error.code() is grpc.StatusCode.CANCELLED:  # not by us, which is no error of gRPC's: the server is ending
        return Unavailable(f"{peer} ended before it had answered: try again when it is back", retry_after_seconds=0.0)
    return mapped
