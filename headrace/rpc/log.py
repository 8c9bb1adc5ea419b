"""JSON logs on stderr, one object a line, with the ids bound around the call; background work whose end is logged."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO, cast

import structlog
from structlog.typing import EventDict

from headrace.rpc.retry import Backoff

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_GRPC = "grpc._cython.cygrpc"
cygrpc = import_module(_GRPC)  # it has no stubs


def configure_logging(service: str, *, run: str | None = None) -> None:
    """Call it at the start of a process. Every line carries `service`, and `run` if it is given."""
    constants = {"service": service} | ({"run": run} if run else {})

    def add_constants(logger: object, method: str, event: EventDict) -> EventDict:
        # Not bound as context: gRPC starts handlers outside of the context in which the process was set up.
        return {**constants, **event}

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger(_GRPC).addFilter(_concerns_the_server)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_constants,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Unfailing(sys.stderr))),
    )


class _Unfailing:
    """A stream that may be full, cut off or closed: what it refuses is left out, and no work fails by it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def drop_logs() -> None:
    """Turns our logging off, for a process that prints for a person."""
    logging.disable(logging.CRITICAL)
    structlog.configure(processors=[_drop])


def _drop(logger: object, method: str, event: EventDict) -> NoReturn:
    raise structlog.DropEvent


def _concerns_the_server(record: logging.LogRecord) -> bool:
    """False for gRPC's traceback of a caller that left before our answer was out, where no interceptor reaches."""
    return not (record.exc_info and isinstance(record.exc_info[1], cygrpc.ExecuteBatchError))


_LONGEST_PAUSE_SECONDS = 30.0
_GOOD_SECONDS = 60.0
"""Work that went on for so long is started again without a long pause."""


async def kept_running(name: str, work: Callable[[], Awaitable[None]], ended: Callable[[str], None]) -> None:
    """Runs `work()` until it returns.

    After an exception `ended(name)` is called, and `work()` begins again after a pause that grows.
    """
    backoff = Backoff(longest_seconds=_LONGEST_PAUSE_SECONDS)
    while True:
        started = time.monotonic()
        try:
            return await work()
        except Exception as error:  # whatever it is: the service depends on this work and cannot tell that it is gone
            if time.monotonic() - started > _GOOD_SECONDS:
                backoff.reset()
            pause_seconds = backoff.next_seconds()
            log.error("background_work_ended", work=name, again_in_seconds=round(pause_seconds, 2), exc_info=error)
            ended(name)
        await asyncio.sleep(pause_seconds)
