"""The worker's half. Functions run in the main thread (libraries use SIGALRM there); coroutines share its event loop.

consumes: Start and Cancel from its service; produces: one reply for every Start.
Ends when the service is gone: by end of file while it waits, by its spawner's kill while it computes.
User code may do anything to this process. What can be put right is put right after the call (`state`);
for the rest the service kills it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from headrace.errors import HeadraceError
from headrace.limits import MAX_HOOK_ANSWER_BYTES
from headrace.process.linux import children, wants_a_core
from headrace.process.workers import codec, frame
from headrace.process.workers.state import ProcessState

_MESSAGE_CHARACTERS = 2_000
"""The limit for a report of an exception: its class, its message and where it was raised."""
_PLACE_CHARACTERS = 500
_TRACEBACK_CHARACTERS = 32_000
# A process that was told to end, or whose pipe was closed, takes a moment to be gone; longer where it gets no core.
_LEAVE_SECONDS = 0.3
_LONGEST_LEAVE_SECONDS = 5.0
# Where code lies that its user did not write: headrace's own, and what Python and pip have installed.
_LIBRARIES = (
    str(Path(__file__).resolve().parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
# Started by multiprocessing for the life of the process, not for a call.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def main(channel: socket.socket, secret: bytes) -> NoReturn:
    """Serves calls until the channel closes. Nothing that user code registered or still runs keeps it from ending."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
        os.register_at_fork(after_in_child=partial(_disown, channel.fileno()))
        asyncio.run(_serve(channel, secret))
        os._exit(0)
    except BaseException:  # noqa: BLE001  # printed, and the process ends
        traceback.print_exc()
        sys.stderr.flush()  # `_exit` would lose it
    finally:
        os._exit(70)


def _disown(descriptor: int) -> None:
    """A copy that user code forked shares the channel: it must neither read from it nor write to it."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, descriptor, inheritable=False)
    os.close(null)


async def _serve(channel: socket.socket, secret: bytes) -> None:
    stream, writer = await asyncio.open_connection(sock=channel)
    calls = _Calls(writer, secret)
    reader = frame.orders(stream, secret)
    while True:
        try:
            order = await reader.next()
        except EOFError:
            return
        match order:
            case frame.Start():
                calls.start(order)
            case frame.Cancel(call_id):
                calls.cancel(call_id)


class _Calls:
    def __init__(self, writer: asyncio.StreamWriter, secret: bytes) -> None:
        self._writer = writer
        self._secret = secret
        self._pid = os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._state = ProcessState()
        self._was_shared = False
        self._is_spoiled = False
        self._known: set[int] = set()
        self._cancelled: set[int] = set()

    def start(self, order: frame.Start) -> None:
        if not self._tasks:
            self._was_shared = False
            self._state.remember()
            self._known = set(children(self._pid))
        else:
            self._was_shared = True
        self._tasks[order.call_id] = asyncio.create_task(self._answer(order))

    def cancel(self, call_id: int) -> None:
        """Cancels a call that no caller waits for; one that has finished is ignored."""
        if call_id in self._tasks:
            self._cancelled.add(call_id)
            self._tasks[call_id].cancel()

    async def _answer(self, order: frame.Start) -> None:
        reply = await self._run(order)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that user code forked and that came back here: the answer is the original's
        del self._tasks[order.call_id]
        self._cancelled.discard(order.call_id)
        if not self._tasks and not order.prepares:
            reply = self._clean(reply)
        data = frame.encode(reply, self._secret)
        if len(data) > MAX_HOOK_ANSWER_BYTES:
            detail = f"{len(data)} bytes are more than the {MAX_HOOK_ANSWER_BYTES} that a call may return"
            data = frame.encode(frame.Raised(order.call_id, "TooLarge", detail, "", False), self._secret)
        self._writer.write(data)
        await self._writer.drain()
        if self._is_spoiled and not self._tasks:
            os._exit(0)

    async def _run(self, order: frame.Start) -> frame.Reply:
        limit = asyncio.timeout(order.timeout_seconds)
        try:
            async with limit:
                function, args = pickle.loads(order.work)  # noqa: S301  # the service's own function and arguments
                result = function(*args)
                if inspect.isawaitable(result):
                    result = await result
            return frame.Returned(order.call_id, codec.encode(result))
        except BaseException as error:  # noqa: BLE001  # the boundary to user code: sys.exit() in a hook ends the call, not the worker
            if order.call_id in self._cancelled or (limit.expired() and isinstance(error, TimeoutError)):
                return frame.Expired(order.call_id)  # in the first case nobody waits for it
            return _raised(order.call_id, error)

    def _clean(self, reply: frame.Reply) -> frame.Reply:
        """Restores the process when no call runs. A call that ran alone is told which processes it left behind."""
        self._is_spoiled |= not self._state.restore()
        left = _left_behind(self._known)
        _bury_the_dead()
        for pid in left:
            _end(pid)
        if left and not self._was_shared and isinstance(reply, frame.Returned):
            return frame.LeftBehind(reply.call_id, _named(left))
        return reply


def _raised(call_id: int, error: BaseException) -> frame.Raised:
    where = _printable(lambda: _where(error), _PLACE_CHARACTERS)
    kind = _printable(lambda: type(error).__name__, _PLACE_CHARACTERS)
    return frame.Raised(
        call_id,
        kind,
        _printable(lambda: str(error), _MESSAGE_CHARACTERS - len(where) - len(kind)),
        _printable(lambda: "".join(traceback.format_exception(error)), _TRACEBACK_CHARACTERS),
        isinstance(error, HeadraceError),
        where,
    )


def _where(error: BaseException) -> str:
    """file:line of the innermost frame that is neither headrace's nor an installed library's."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _printable(text: Callable[[], str], characters: int) -> str:
    """The result of `text()`, cut, and encodable as UTF-8."""
    try:
        said = str.__getitem__(text(), slice(characters + 1))  # a subclass of str is user code too
    except BaseException:  # noqa: BLE001  # user code prints itself
        return "(it cannot be printed)"
    cut = said if len(said) <= characters else said[:characters] + "…"
    return cut.encode("utf-8", "backslashreplace").decode()


def _left_behind(known: set[int]) -> list[int]:
    """Processes that were started since, and run on after a moment."""
    began = time.monotonic()
    while left := [pid for pid in children(os.getpid()) if pid not in known and not _is_helper(pid)]:
        waited = time.monotonic() - began
        has_had_a_moment = waited > _LEAVE_SECONDS and not all(wants_a_core(pid, _LEAVE_SECONDS) for pid in left)
        if has_had_a_moment or waited > _LONGEST_LEAVE_SECONDS:
            return left
        time.sleep(0.01)
    return []


def _bury_the_dead() -> None:
    """Waits for children that have ended: no other code will, now that their call has returned."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _is_helper(pid: int) -> bool:
    return any(helper in _command(pid) for helper in _HELPERS)


def _named(pids: list[int]) -> str:
    what = "a process" if len(pids) == 1 else f"{len(pids)} processes"
    return f"{what} (process id {', '.join(map(str, pids[:8]))})"


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):  # it ended, and was waited for
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
