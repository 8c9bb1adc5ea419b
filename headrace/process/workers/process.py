"""One worker process as its service sees it.

States: running → ended (killed, crashed, broken, or closed). A call is pending from its Start to its reply. When the
process ends, the call that had it to itself from its start is to blame. A call that shared it, now or with earlier ones
that may have left something behind, is `Innocent` until it ran alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.process.workers import codec, frame
from headrace.process.workers.errors import (
    WorkerBroken,
    WorkerCrashed,
    WorkerError,
    WorkerLeftProcesses,
    WorkerRaised,
    WorkerReturnedUnreadable,
    WorkerTimeout,
)
from headrace.process.workers.spawner import Spawned, Spawner

# A coroutine that waits is cancelled by the worker itself at its limit; only one that does not yield has to be killed.
_KILL_GRACE_SECONDS = 1.0
# Between the end of a process's channel and the news of its end.
_NEWS_SECONDS = 0.5


class Innocent(Exception):
    """The worker ended, possibly because of another call: run this one again, alone."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    name: str
    timeout_seconds: float


class Worker:
    """A child process and its pending calls."""

    def __init__(
        self, spawner: Spawner, spawned: Spawned, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._spawner = spawner
        self._spawned = spawned
        self._writer = writer
        self._pending: dict[int, asyncio.Future[frame.Reply]] = {}
        self._calls = 0
        self._is_shared = False
        self._listening = asyncio.create_task(self._listen(frame.replies(reader, spawned.secret)))
        self.ended = False

    @classmethod
    async def start(cls, spawner: Spawner) -> Worker:
        """Starts a new process. Raises Unavailable when the machine cannot start one."""
        spawned = await spawner.spawn()
        reader, writer = await asyncio.open_connection(sock=spawned.channel)
        return cls(spawner, spawned, reader, writer)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._spawned.pid

    async def prepare(self, function: Callable[[], object], *, timeout_seconds: float) -> None:
        """Runs headrace's or the user's preparation; the call after it is the first. Raises WorkerError."""
        call = _Call(run_prepare, "preparation", timeout_seconds)
        await self._run(call, (function,), prepares=True)
        self._calls = 0

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, timeout_seconds: float, name: str
    ) -> Any:
        """The function's result from the child. Raises Innocent, or WorkerError whose message has `name`."""
        return await self._run(_Call(function, name, timeout_seconds), args, prepares=False)

    async def close(self) -> None:
        """Kills the process and everything that it started; returns when all of it is gone."""
        self._mark_ended()
        await self._spawner.end(self._spawned)
        await self._listening

    async def _run(self, call: _Call, args: tuple[Any, ...], *, prepares: bool) -> Any:
        work = _pickled(call, args)
        call_id = secrets.randbits(63)
        reply: asyncio.Future[frame.Reply] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = reply
        self._calls += 1
        used = self._calls > 1
        try:
            self._write(frame.Start(call_id, work, call.timeout_seconds, prepares))
            async with asyncio.timeout(call.timeout_seconds + _KILL_GRACE_SECONDS):
                return _result(await reply, call)
        except TimeoutError:
            self._mark_ended()
            await self.close()
            raise (Innocent() if self._is_shared else WorkerTimeout(call.name, call.timeout_seconds)) from None
        except asyncio.CancelledError:
            self._abandon(call_id)
            raise
        except _Ended as ended:
            raise (Innocent() if used or self._is_shared else ended.error(call.name)) from None

    def _mark_ended(self) -> None:
        if not self.ended:
            self.ended = True
            self._is_shared = len(self._pending) > 1

    def _abandon(self, call_id: int) -> None:
        if self.ended:
            return
        if len(self._pending) == 1:
            self._mark_ended()
            self._spawner.kill(self._spawned)
        else:
            self._write(frame.Cancel(call_id))

    def _write(self, order: frame.Order) -> None:
        self._writer.write(frame.encode(order, self._spawned.secret))

    async def _listen(self, reader: frame.Reader[frame.Reply]) -> None:
        what = await self._replies(reader)
        self._mark_ended()
        await self._spawner.end(self._spawned)
        self._writer.close()
        end = _Ended(what, await self._spawned.ended)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(end)

    async def _replies(self, reader: frame.Reader[frame.Reply]) -> str | None:
        """Delivers replies until the channel ends. Returns what a call did to the channel.

        None when the process ended first.
        """
        try:
            while True:
                reply = await reader.next()
                if reply.call_id not in self._pending:
                    raise frame.Corrupt("a reply to nobody")
                waiting = self._pending.pop(reply.call_id)
                if not waiting.done():  # else its caller was cancelled
                    waiting.set_result(reply)
        except frame.Corrupt:
            return "wrote to the channel to its service"
        except EOFError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_SECONDS):
                    await asyncio.shield(self._spawned.ended)
            return None if self._spawned.ended.done() else "closed the channel to its service"


class _Ended(Exception):
    """The worker ended; `what` is what the call did to the channel, None when the process ended first."""

    def __init__(self, what: str | None, returncode: int) -> None:
        super().__init__(what, returncode)
        self._what = what
        self._returncode = returncode

    def error(self, name: str) -> WorkerError:
        """The error for the call that is to blame."""
        return WorkerBroken(name, self._what) if self._what else WorkerCrashed(name, self._returncode)


def run_prepare(prepare: Callable[[], object]) -> None:
    """Runs `prepare` for its effect on the worker; its result is not sent."""
    prepare()


def _pickled(call: _Call, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((call.function, args))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise WorkerRaised(
            call.name, "Unsendable", f"{call.name} cannot be called with these arguments: {error}", "", True
        ) from error


def _result(reply: frame.Reply, call: _Call) -> Any:
    match reply:
        case frame.Returned(_, result):
            try:
                return codec.decode(call.function, result)
            except codec.Unreadable as error:
                raise WorkerReturnedUnreadable(call.name, str(error)) from error
        case frame.Raised(_, kind, detail, traceback, is_ours, where):
            raise WorkerRaised(call.name, kind, detail, traceback, is_ours, where)
        case frame.LeftBehind(_, processes):
            raise WorkerLeftProcesses(call.name, processes)
        case frame.Expired():
            raise WorkerTimeout(call.name, call.timeout_seconds)
