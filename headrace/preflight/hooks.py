"""User hooks in a check: each in a worker, so that what it imports or breaks is not the check's concern."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from headrace.errors import ConfigError
from headrace.preflight.process import CheckOptions
from headrace.preflight.report import Report
from headrace.process.workers import WorkerError, WorkerPool

LOAD_SECONDS = 120.0


@asynccontextmanager
async def hook_pool(options: CheckOptions, report: Report, pool: WorkerPool | None = None) -> AsyncIterator[WorkerPool]:
    """A pool for one hook at a time, or the given one, closed at the end. A hook's failure ends the block, refused."""
    pool = pool or WorkerPool(1)
    try:
        with refused_in(report, options):
            yield pool
    finally:
        await pool.close()


@contextmanager
def refused_in(report: Report, options: CheckOptions) -> Iterator[None]:
    """A hook's failure ends the block and is a refusal; where the job is for another machine, it is only unchecked."""
    try:
        yield
    except WorkerError as error:
        report.refuse(ConfigError(error.message), elsewhere=options.elsewhere)
