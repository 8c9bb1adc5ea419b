"""A check is an async function: its docstring is the promise, and it raises Broken where that is not kept."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import HeadraceError
from headrace.rpc.client import Reply, call_once

CALL_SECONDS = 60.0
"""As long as one answer may take."""
_CHECK_SECONDS = 300.0

T = TypeVar("T")
Check = Callable[[T], Awaitable[None]]


class Broken(Exception):
    """What the service did instead."""


@dataclass(frozen=True, slots=True)
class Result:
    promise: str
    broken: str | None
    """What the service did instead; None where the promise was kept."""


async def results(checks: Sequence[Check[T]], subject: T) -> AsyncIterator[Result]:
    """Yields one result a check. A check that is not answered in time, or is refused, is broken."""
    for check in checks:
        promise = inspect.getdoc(check) or check.__name__
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await check(subject)
        except Broken as broken:
            yield Result(promise, str(broken))
        except TimeoutError:
            yield Result(promise, f"there was no answer within {_CHECK_SECONDS:g} s")
        except HeadraceError as error:
            yield Result(promise, f"the call was refused with {error.status}: {error.message}")
        else:
            yield Result(promise, None)


async def ask(method: Callable[..., Awaitable[Reply]], request: Any) -> Reply:
    """Returns the answer. Raises the error that stands for its status."""
    return await call_once(method, request, deadline_seconds=CALL_SECONDS)


def require(kept: object, otherwise: str) -> None:
    if not kept:
        raise Broken(otherwise)


@contextmanager
def refused(what: str, *statuses: str) -> Any:
    """The block makes a call that has to be refused with one of these statuses."""
    try:
        yield
    except HeadraceError as error:
        require(error.status in statuses, f"{what} was refused with {error.status}, not {' or '.join(statuses)}")
    else:
        raise Broken(f"{what} was accepted, and not refused with {' or '.join(statuses)}")


async def require_serving(channel: Any, service: str) -> None:
    """Asks grpc.health.v1 for the service by its name."""
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await ask(stub.Check, health_pb2.HealthCheckRequest(service=service))
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    require(reply.status == health_pb2.HealthCheckResponse.SERVING, f"grpc.health.v1 says {state} of {service}")
