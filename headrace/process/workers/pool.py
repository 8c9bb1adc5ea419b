"""A fixed number of workers, each with a fixed number of places; a call takes a place.

consumes: calls; waits for: a free place, in fair turns of the callers, at most `max_waiting` calls of all;
unblocked by: the end of a call, in any way. A worker that ended is replaced when its place is taken next. A call that
may have suffered from another one is run again in a worker of its own: functions must bear to be run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.errors import ResourceExhausted
from headrace.process.workers.errors import WorkerError, WorkerRaised
from headrace.process.workers.process import Innocent, Worker
from headrace.process.workers.spawner import Spawner
from headrace.process.workers.turns import Caller, Turns

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

_NOBODY: Caller = ("", 0)


class WorkerPool:
    """Runs functions (module-level, found by import) in killable processes, each call under a time limit.

    What a function returns is read as the type that it declares, and refused as WorkerRaised where it is another.
    `calls_per_worker` above 1 is for coroutine functions that mostly wait. `prepare` runs in every new worker before
    its first call, so that imports and model loading are not on a call's clock. `has_guest` adds a worker for a caller
    who would otherwise wait for callers that hold all the others.
    """

    def __init__(
        self,
        size: int,
        *,
        calls_per_worker: int = 1,
        max_waiting: int = 4096,
        prepare: Callable[[], object] | None = None,
        prepare_seconds: float = 120.0,
        has_guest: bool = False,
    ) -> None:
        self._size = size
        self._max_waiting = max_waiting
        self._spawner = Spawner()
        self._recipe = _Recipe(self._spawner, prepare, prepare_seconds)
        self._slots = [_Slot(self._recipe) for _ in range(size)]
        self._guest = _Slot(self._recipe) if has_guest else None
        self._turns = Turns(self._slots * calls_per_worker, self._guest)
        self._alone = asyncio.Semaphore(size)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._turns.waiting

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [slot.worker.pid for slot in self._slots if slot.worker and not slot.worker.ended]

    async def start(self) -> None:
        """Starts all workers. Raises WorkerError when `prepare` fails."""
        try:
            await asyncio.gather(*(slot.ready() for slot in self._slots))
        except WorkerError:
            await self.close()
            raise

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float,
        name: str | None = None,
        caller: Caller = _NOBODY,
    ) -> Any:
        """`function(*args)`, awaited if it is a coroutine; the limit counts from its start, not from its wait.

        `name` stands for the function in messages: what a person calls the thing, e.g. the path of a hook.
        Raises WorkerTimeout, WorkerCrashed, WorkerBroken, WorkerRaised, Unavailable when no process can be started, or
        ResourceExhausted when too many calls wait.
        """
        name = name or f"{function.__module__}.{function.__qualname__}"
        if self._turns.waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._turns.waiting} calls already wait for {self._size} workers, which is the limit: try again "
                f"later or add workers",
                reason="QUEUE_FULL",
            )
        slot = await self._turns.take(caller)
        try:
            with _failures_logged(name):
                try:
                    worker = await slot.ready()
                    return await worker.call(function, args, timeout_seconds=timeout_seconds, name=name)
                except Innocent:
                    _log().info("worker_call_runs_again", function=name)
                    return await self._run_alone(function, args, timeout_seconds, name)
        finally:
            self._turns.give(caller, slot)

    async def close(self) -> None:
        """Ends every worker and the calls that run in it."""
        slots = [*self._slots, *([self._guest] if self._guest else [])]
        await asyncio.gather(*(slot.worker.close() for slot in slots if slot.worker))
        await self._spawner.close()

    async def _run_alone(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float, name: str
    ) -> Any:
        async with self._alone:
            worker = await self._recipe.start()
            try:
                return await worker.call(function, args, timeout_seconds=timeout_seconds, name=name)
            finally:
                await worker.close()


class _Recipe:
    """Starts and prepares workers."""

    def __init__(self, spawner: Spawner, prepare: Callable[[], object] | None, prepare_seconds: float) -> None:
        self._spawner = spawner
        self._prepare = prepare
        self._prepare_seconds = prepare_seconds

    async def start(self) -> Worker:
        """Starts and prepares a new worker."""
        worker = await Worker.start(self._spawner)
        if self._prepare is not None:
            try:
                await worker.prepare(self._prepare, timeout_seconds=self._prepare_seconds)
            except BaseException:  # a caller that was cancelled as well: the process must not stay
                await worker.close()
                raise
        return worker


class _Slot:
    """Holds a worker, and replaces it when it has ended."""

    def __init__(self, recipe: _Recipe) -> None:
        self.worker: Worker | None = None
        self._recipe = recipe
        self._starting = asyncio.Lock()

    async def ready(self) -> Worker:
        """The live worker; starts and prepares one first if there is none."""
        async with self._starting:
            if self.worker is None or self.worker.ended:
                self.worker = await self._recipe.start()
            return self.worker


def _log() -> BoundLogger:
    from headrace.rpc.log import log  # the spawner imports this package, and has no use for gRPC and structlog

    return log


@contextmanager
def _failures_logged(name: str) -> Iterator[None]:
    try:
        yield
    except WorkerRaised as error:
        if not error.is_ours:  # ours say what is wrong in their message
            _log().warning("worker_call_raised", function=name, traceback=error.traceback)
        raise
    except WorkerError as error:
        _log().warning("worker_call_ended", function=name, message=error.message)
        raise
