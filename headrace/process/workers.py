"""Runs user code and fragile libraries in processes that can be killed.

A pool has a fixed number of workers, each with a fixed number of places; a call takes a place.
consumes: calls; waits for: a free place, in turns of the callers, at most `max_waiting` calls of all; unblocked by: the
end of a call, in any way. A worker that ended is replaced when its place is taken next. multiprocessing's fork server
starts them, one for a service: a worker costs a fork, not an interpreter's start. It runs no user code and no thread.

When a worker ends, the call that had it to itself from its start is to blame. A call that shared it, now or with
earlier ones that may have left something behind, is run again once, alone: functions must bear to be run again.

WorkerError
├── WorkerTimeout   it took longer than its limit; the worker was killed if it did not stop by itself
├── WorkerCrashed   its process died, or closed or wrote to its channel and was killed
└── WorkerRaised    it raised, returned a value that cannot be sent or read, or left processes behind
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, process, util
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.errors import ResourceExhausted, Unavailable
from headrace.limits import MAX_HOOK_ANSWER_BYTES, encodable
from headrace.process.linux import descendants
from headrace.process.scratch import folder_for_sockets
from headrace.process.worker_main import (
    REPLIES,
    Cancel,
    Expired,
    Order,
    Raised,
    Reply,
    Returned,
    Start,
    Unreadable,
    WorkerMain,
    decode,
    packed,
    read,
)
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.rpc.proxies import direct_to

_STDERR = 2
_START_SECONDS = 120.0
_END_SECONDS = 10.0
# A coroutine that waits is cancelled by the worker itself at its limit; only one that does not yield has to be killed.
_KILL_GRACE_SECONDS = 1.0
# A process that user code forked may hold the channel of a worker that has ended.
_LAST_REPLIES_SECONDS = 0.5
# Most workers need them: imported once by the fork server, they cost a worker nothing.
_IMPORTED_FIRST = ["headrace.process.worker_main", "headrace.hooks"]


class WorkerError(Exception):
    """Base class; `message` is one sentence for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class WorkerTimeout(WorkerError):
    """The call exceeded `timeout_seconds`."""

    def __init__(self, function: str, timeout_seconds: float) -> None:
        super().__init__(f"{function} did not finish within {timeout_seconds:g} s and was ended")
        self.timeout_seconds = timeout_seconds


class WorkerCrashed(WorkerError):
    """The worker's process ended in the middle of the call; `returncode` is negative for a signal."""

    def __init__(self, function: str, returncode: int) -> None:
        super().__init__(f"{function} ended its worker process with {_how(returncode)}")
        self.returncode = returncode


class WorkerRaised(WorkerError):
    """The call raised an exception of class `kind`; `is_ours` when that is of `headrace.errors`' tree.

    `where` is the file and line of the user's code, if it went through any.
    """

    def __init__(
        self, function: str, kind: str, detail: str, traceback: str = "", is_ours: bool = True, where: str = ""
    ) -> None:
        at = f" ({where})" if where else ""
        super().__init__(detail if is_ours else f"{function} raised {kind}: {detail}".rstrip(": ") + at)
        self.kind = kind
        self.is_ours = is_ours
        self.detail = detail
        self.traceback = traceback


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    names = {int(number): number.name for number in signal.Signals}
    killed = " (killed: out of memory?)" if returncode == -signal.SIGKILL else ""
    return names.get(-returncode, f"signal {-returncode}") + killed


class RetryAlone(Exception):
    """The worker ended, possibly because of another call: run this one again, alone."""


class Worker:
    """A child process and its pending calls. States: running → ended (killed, crashed, or closed)."""

    def __init__(self, pid: int, status: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`status` is a descriptor from which the exit code can be read."""
        self.pid = pid
        self.ended = False
        self._reader = reader
        self._writer = writer
        self._call_ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Reply | None]] = {}
        """A reply of None: the worker has ended."""
        self._num_calls = 0
        self._is_shared = False
        loop = asyncio.get_running_loop()
        self._returncode: asyncio.Future[int] = loop.create_future()
        loop.add_reader(status, self._exited, status)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls) -> Worker:
        """Starts a new process. Raises Unavailable when the machine cannot start one."""
        ours, theirs = socket.socketpair()
        with ExitStack() as on_failure:
            on_failure.callback(ours.close)  # a worker that starts nevertheless ends at once
            try:
                with theirs:
                    async with asyncio.timeout(_START_SECONDS):
                        pid, status = await asyncio.to_thread(_forked, theirs.fileno(), {**os.environ, **direct_to()})
            except (OSError, EOFError) as error:
                why = error or "the fork server gave none"
                raise Unavailable(f"a worker process cannot be started: {why}") from error
            on_failure.pop_all()
        return cls(pid, status, *await asyncio.open_connection(sock=ours))

    async def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout_seconds: float,
        name: str,
        prepares: bool = False,
    ) -> Any:
        """The function's result from the child. Raises RetryAlone, or WorkerError whose message has `name`.

        A call that `prepares` the worker does not count as one that another shares the worker with.
        """
        work = _pickled(name, function, args)
        was_used = self._num_calls > 0
        self._num_calls += not prepares
        call_id = next(self._call_ids)
        reply: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = reply
        try:
            self._write(Start(call_id, encodable(name), work, timeout_seconds, prepares, tracing.parents()))
            async with asyncio.timeout(timeout_seconds + _KILL_GRACE_SECONDS):
                answer = await reply
        except TimeoutError:
            await self.close()
            raise (RetryAlone() if self._is_shared else WorkerTimeout(name, timeout_seconds)) from None
        except asyncio.CancelledError:
            self._abandon(call_id)
            raise
        if answer is None:
            if was_used or self._is_shared:
                raise RetryAlone
            raise WorkerCrashed(name, await self._returncode)
        return _result(answer, function, name, timeout_seconds)

    async def close(self) -> None:
        """Kills the process and everything that it started; returns when it is gone."""
        self._kill()
        await asyncio.wait({self._listening}, timeout=_END_SECONDS)

    def _kill(self) -> None:
        self._mark_ended()
        if not self._returncode.done():
            for pid in (*descendants(self.pid), self.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _mark_ended(self) -> None:
        if not self.ended:
            self.ended = True
            self._is_shared = len(self._pending) > 1

    def _abandon(self, call_id: int) -> None:
        if self.ended:
            return
        if len(self._pending) == 1:
            self._kill()
        else:
            self._write(Cancel(call_id))

    def _write(self, order: Order) -> None:
        self._writer.write(packed(order))

    def _exited(self, status: int) -> None:
        """Takes the exit code when the fork server tells it."""
        asyncio.get_running_loop().remove_reader(status)
        try:
            returncode = forkserver.read_signed(status)
        except EOFError:  # the fork server was killed, and its workers with it
            returncode = -signal.SIGKILL
        os.close(status)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it left behind
        asyncio.get_running_loop().call_later(_LAST_REPLIES_SECONDS, self._writer.transport.abort)
        self._returncode.set_result(returncode)

    async def _listen(self) -> None:
        with suppress(EOFError):
            while True:
                reply = await read(self._reader, REPLIES, MAX_HOOK_ANSWER_BYTES)
                waiting = self._pending.pop(reply.call_id, None)
                if waiting is not None and not waiting.done():  # else its caller was cancelled
                    waiting.set_result(reply)
        self._kill()
        self._writer.close()
        await self._returncode
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_result(None)


def _forked(channel: int, environment: Mapping[str, str]) -> tuple[int, int]:
    """Asks the fork server for a process. Returns its id, and a descriptor from which its exit code can be read.

    Raises OSError or EOFError when the machine cannot start one.
    """
    forkserver.set_forkserver_preload(_IMPORTED_FIRST)
    _shorten_socket_path()
    place = {"sys_path": sys.path, "dir": os.getcwd()}
    status, data = forkserver.connect_to_new_process([channel, _STDERR])
    with ExitStack() as on_failure:
        on_failure.callback(os.close, status)
        with open(data, "wb") as start:
            pickle.dump(place, start)
            pickle.dump(WorkerMain(dict(environment)), start)
        pid = forkserver.read_signed(status)
        on_failure.pop_all()
    return pid, status


def _shorten_socket_path() -> None:
    """Puts the fork server's socket where TMPDIR is too long for it."""
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]  # as util.get_temp_dir does
    if "tempdir" not in config and (short := folder_for_sockets()) != Path(tempfile.gettempdir()):
        folder = config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=short)
        util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)


def _pickled(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise WorkerRaised(name, "Unsendable", f"{name} cannot be called with these arguments: {error}") from error


def _result(reply: Reply, function: Callable[..., Any], name: str, timeout_seconds: float) -> Any:
    match reply:
        case Returned(_, result):
            try:
                return decode(function, result)
            except Unreadable as error:
                message = f"{name} returned a value that cannot be used: {error}"
                raise WorkerRaised(name, "Unreadable", message) from error
        case Raised(_, kind, detail, traceback, is_ours, where):
            raise WorkerRaised(name, kind, detail, traceback, is_ours, where)
        case Expired():
            raise WorkerTimeout(name, timeout_seconds)


Slot = TypeVar("Slot")


class FairQueue(Generic[Slot]):
    """Free slots, and callers that wait for one in turns; a caller's own calls are first come, first served."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._free = list(slots)
        self._callers: OrderedDict[Hashable, deque[asyncio.Future[Slot]]] = OrderedDict()
        self.waiting = 0

    async def take(self, caller: Hashable) -> Slot:
        """Returns a slot, at once or in turn."""
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._callers.setdefault(caller, deque()).append(turn)
        self.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.waiting -= 1
            else:
                self.give(turn.result())
            raise

    def give(self, slot: Slot) -> None:
        """Hands a slot to the next caller."""
        while self._callers:
            caller, turns = self._callers.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._callers[caller] = turns
            if not turn.done():  # else it was cancelled
                self.waiting -= 1
                turn.set_result(slot)
                return
        self._free.append(slot)


@dataclass
class _Slot:
    """A worker, which is replaced when it has ended."""

    worker: Worker | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkerPool:
    """Runs functions (module-level, found by import) in killable processes, each call under a time limit.

    What a function returns is read as the type that it declares, and refused as WorkerRaised where it is another.
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
        self._max_waiting = max_waiting
        self._prepare = prepare
        self._prepare_seconds = prepare_seconds
        self._slots = [_Slot() for _ in range(size)]
        self._queue = FairQueue(self._slots * calls_per_worker)
        self._alone = asyncio.Semaphore(size)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._queue.waiting

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [slot.worker.pid for slot in self._slots if slot.worker and not slot.worker.ended]

    async def start(self) -> None:
        """Starts all workers. Raises WorkerError when `prepare` fails."""
        try:
            await asyncio.gather(*(self._running(slot) for slot in self._slots))
        except WorkerError:
            await self.close()
            raise

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float,
        name: str | None = None,
        caller: Hashable = None,
    ) -> Any:
        """`function(*args)`, awaited if it is a coroutine; the limit counts from its start, not from its wait.

        `name` stands for the function in messages: what a person calls the thing, e.g. the path of a hook.
        Raises WorkerTimeout, WorkerCrashed, WorkerRaised, Unavailable when no process can be started, or
        ResourceExhausted when too many calls wait.
        """
        name = name or f"{function.__module__}.{function.__qualname__}"
        if self._queue.waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._queue.waiting} calls already wait for {self._size} workers, which is the limit: try again "
                f"later or add workers",
                reason="QUEUE_FULL",
            )
        slot = await self._queue.take(caller)
        try:
            with _failures_logged(name):
                try:
                    worker = await self._running(slot)
                    return await worker.call(function, args, timeout_seconds=timeout_seconds, name=name)
                except RetryAlone:
                    log.info("worker_call_runs_again", function=name)
                async with self._alone:
                    worker = await self._new_worker()
                    try:
                        return await worker.call(function, args, timeout_seconds=timeout_seconds, name=name)
                    finally:
                        await worker.close()
        finally:
            self._queue.give(slot)

    async def close(self) -> None:
        """Ends every worker and the calls that run in it."""
        await asyncio.gather(*(slot.worker.close() for slot in self._slots if slot.worker))

    async def _running(self, slot: _Slot) -> Worker:
        async with slot.starting:
            if slot.worker is None or slot.worker.ended:
                slot.worker = await self._new_worker()
            return slot.worker

    async def _new_worker(self) -> Worker:
        worker = await Worker.start()
        if self._prepare is not None:
            async with AsyncExitStack() as on_failure:  # a caller that was cancelled as well: the process must not stay
                on_failure.push_async_callback(worker.close)
                await worker.call(
                    run_prepare,
                    (self._prepare,),
                    timeout_seconds=self._prepare_seconds,
                    name="preparation",
                    prepares=True,
                )
                on_failure.pop_all()
        return worker


def run_prepare(prepare: Callable[[], object]) -> None:
    """Runs `prepare` for its effect on the worker; its result is not sent."""
    prepare()


@contextmanager
def _failures_logged(name: str) -> Iterator[None]:
    try:
        yield
    except WorkerRaised as error:
        if not error.is_ours:  # ours say what is wrong in their message
            log.warning("worker_call_raised", function=name, traceback=error.traceback)
        raise
    except WorkerError as error:
        log.warning("worker_call_ended", function=name, message=error.message)
        raise
