"""One worker process as its parent sees it.

States: running → ended (killed, crashed, or closed). A call is pending from its Start to its reply. When the process
ends with one call pending, that call is to blame; with several, nobody knows which: all are `Innocent` until run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from headrace.workers import frame
from headrace.workers.errors import WorkerCrashed, WorkerRaised, WorkerTimeout

# A coroutine that waits is cancelled by the worker itself at its limit; only one that does not yield has to be killed.
_KILL_GRACE_SECONDS = 1.0
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from headrace.workers.child import main; main(int(sys.argv[1]))"
)


class Innocent(Exception):
    """The worker ended for a reason that may be another call's: run this one again, alone."""


class Worker:
    """A child process and the calls it holds."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._writer = writer
        self._pending: dict[int, asyncio.Future[frame.Reply]] = {}
        self._ids = itertools.count()
        self._listening = asyncio.create_task(self._listen(reader))
        self._crowded = False
        self.ended = False

    @classmethod
    async def start(cls) -> Worker:
        """A fresh interpreter (never a fork of a threaded server) with this one's import path."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(sys.path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what user code prints belongs with the logs
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a kill takes the processes that user code started along
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, timeout_seconds: float, name: str
    ) -> Any:
        """What the function returns in the child. Raises WorkerError, whose message says `name`, or Innocent."""
        call_id = next(self._ids)
        reply: asyncio.Future[frame.Reply] = asyncio.get_running_loop().create_future()
        start = frame.Start(call_id, pickle.dumps((function, args)), timeout_seconds)
        self._pending[call_id] = reply
        try:
            self._writer.write(frame.encode(start))
            async with asyncio.timeout(timeout_seconds + _KILL_GRACE_SECONDS):
                return _result(await reply, name, timeout_seconds)
        except TimeoutError:
            self.kill()
            raise (Innocent() if self._crowded else WorkerTimeout(name, timeout_seconds)) from None
        except asyncio.CancelledError:
            self._abandon(call_id)
            raise
        except _Ended as ended:
            raise (Innocent() if self._crowded else WorkerCrashed(name, ended.returncode)) from None

    def kill(self) -> None:
        """Ends the process and its children now."""
        self._mark_ended()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # dead, and not yet reaped
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kills, and returns when the process is gone."""
        self.kill()
        await self._listening

    def _mark_ended(self) -> None:
        if not self.ended:
            self.ended = True
            self._crowded = len(self._pending) > 1

    def _abandon(self, call_id: int) -> None:
        if len(self._pending) == 1:
            self.kill()
        elif not self.ended:
            self._writer.write(frame.encode(frame.Cancel(call_id)))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply: frame.Reply = await frame.read(reader)
                waiting = self._pending.pop(reply.call_id)
                if not waiting.done():  # else its caller was cancelled
                    waiting.set_result(reply)
        except EOFError:
            self.kill()  # a process that closed its socket and lives on is of no use
        self._writer.close()
        returncode = await self._process.wait()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(_Ended(returncode))


class _Ended(Exception):
    def __init__(self, returncode: int) -> None:
        super().__init__(returncode)
        self.returncode = returncode


def _result(reply: frame.Reply, name: str, timeout_seconds: float) -> Any:
    match reply:
        case frame.Returned(_, result):
            return pickle.loads(result)
        case frame.Raised(_, kind, detail, traceback, is_ours):
            raise WorkerRaised(name, kind, detail, traceback, is_ours)
        case frame.Expired():
            raise WorkerTimeout(name, timeout_seconds)
