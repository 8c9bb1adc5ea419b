"""A fixed number of workers, each with a fixed number of places; a call takes a place.

consumes: calls; waits for: a free place, at most `max_waiting` of them; unblocked by: the end of a call, in any way.
A worker that ended is replaced when its place is taken next. A call that shared a worker with one that had to be killed
is run once more in a worker of its own: functions must bear to be run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.errors import ResourceExhausted
from headrace.rpc.log import log
from headrace.workers.errors import WorkerError, WorkerRaised
from headrace.workers.process import Innocent, Worker


class WorkerPool:
    """Runs functions (module-level, found by import) in killable processes, each call under a time limit.

    `calls_per_worker` above 1 is for coroutine functions that mostly wait. `prepare` runs in every new worker before
    its first call, so that imports and model loading are not on a call's clock.
    """

    def __init__(
        self,
        size: int,
        *,
        calls_per_worker: int = 1,
        max_waiting: int = 4096,
        prepare: Callable[[], object] | None = None,
        prepare_seconds: float = 120.0,
    ) -> None:
        self._size = size
        self._prepare = prepare
        self._prepare_seconds = prepare_seconds
        self._max_waiting = max_waiting
        self._waiting = 0
        self._slots = [_Slot(prepare, prepare_seconds) for _ in range(size)]
        self._places: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots * calls_per_worker:
            self._places.put_nowait(slot)
        self._alone: WorkerPool | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return self._waiting

    @property
    def pids(self) -> list[int]:
        """The live workers' process ids."""
        return [slot.worker.pid for slot in self._slots if slot.worker and not slot.worker.ended]

    async def start(self) -> None:
        """Starts all workers. Raises WorkerError when `prepare` fails."""
        try:
            await asyncio.gather(*(slot.ready() for slot in self._slots))
        except WorkerError:
            await self.close()
            raise

    async def run(
        self, function: Callable[..., Any], *args: Any, timeout_seconds: float, name: str | None = None
    ) -> Any:
        """`function(*args)`, awaited if it is a coroutine; the limit counts from its start, not from its wait.

        `name` stands for the function in messages: what a person calls the thing, e.g. the path of a hook.
        Raises WorkerTimeout, WorkerCrashed, WorkerRaised, or ResourceExhausted when too many calls wait.
        """
        name = name or f"{function.__module__}.{function.__qualname__}"
        slot = await self._take_place()
        try:
            worker = await slot.ready()
            return await worker.call(function, args, timeout_seconds=timeout_seconds, name=name)
        except WorkerRaised as error:
            if not error.is_ours:  # ours say what is wrong in their message
                log.warning("worker_call_raised", function=name, traceback=error.traceback)
            raise
        except WorkerError as error:
            log.warning("worker_call_ended", function=name, message=error.message)
            raise
        except Innocent:
            log.info("worker_call_runs_again", function=name)
        finally:
            self._places.put_nowait(slot)
        if self._alone is None:
            self._alone = WorkerPool(self._size, prepare=self._prepare, prepare_seconds=self._prepare_seconds)
        return await self._alone.run(function, *args, timeout_seconds=timeout_seconds, name=name)

    async def close(self) -> None:
        """Ends every worker, and with it the calls they hold."""
        await asyncio.gather(*(slot.worker.close() for slot in self._slots if slot.worker))
        if self._alone:
            await self._alone.close()

    async def _take_place(self) -> _Slot:
        if self._waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._waiting} calls wait for {self._size} workers, the limit: come back later or add workers",
                reason="QUEUE_FULL",
            )
        self._waiting += 1
        try:
            return await self._places.get()
        finally:
            self._waiting -= 1


class _Slot:
    """Where a worker lives; the next one moves in when it ended."""

    def __init__(self, prepare: Callable[[], object] | None, prepare_seconds: float) -> None:
        self.worker: Worker | None = None
        self._prepare = prepare
        self._prepare_seconds = prepare_seconds
        self._starting = asyncio.Lock()

    async def ready(self) -> Worker:
        """The live worker, started and prepared first if need be."""
        async with self._starting:
            if self.worker is None or self.worker.ended:
                self.worker = await self._start()
            return self.worker

    async def _start(self) -> Worker:
        worker = await Worker.start()
        if self._prepare is not None:
            try:
                await worker.call(
                    *(run_prepare, (self._prepare,)), timeout_seconds=self._prepare_seconds, name="preparation"
                )
            except WorkerError:
                await worker.close()
                raise
        return worker


def run_prepare(prepare: Callable[[], object]) -> None:
    """Runs it for its effect on the worker; what it returns need not travel."""
    prepare()
