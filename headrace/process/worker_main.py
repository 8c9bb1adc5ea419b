"""A worker process: it runs the calls that its service sends.

consumes: Start and Cancel from its service; produces: one reply for every Start.
Functions run in the main thread (libraries use SIGALRM there); coroutines share its event loop. What a call does to the
process (its folder, signal handlers, limits) lasts as long as the worker. The worker ends with its service: by end of
file while it waits, by the end of the fork server while it computes.

A message is its length (8 bytes, little-endian) and MessagePack. Only the service pickles: its own functions and their
arguments (`Start.work`). Results may hold plain values, dataclasses, enumerations, and arrays and scalars of numpy;
tensors become arrays.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import signal
import socket
import struct
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
import numpy as np

from headrace.errors import HeadraceError
from headrace.limits import MAX_HOOK_ANSWER_BYTES, encodable
from headrace.process.linux import adopt_orphans, children, die_with_parent, first_to_go, wants_a_core
from headrace.rpc import tracing

Message = TypeVar("Message")


class Start(msgspec.Struct, tag=True, frozen=True):
    """Run a call. `work` is a pickled (function, args), separate so that a failure to load it is this call's alone.

    Processes that a call which `prepares` starts are kept.
    """

    call_id: int
    name: str
    work: bytes
    timeout_seconds: float
    prepares: bool
    spans: Sequence[str] = ()
    """Those of the caller, as `tracing.parents` says them"""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """No caller waits for the call any more."""

    call_id: int


class Returned(msgspec.Struct, tag=True, frozen=True):
    """`result` is what `encode` makes of the function's result."""

    call_id: int
    result: bytes


class Raised(msgspec.Struct, tag=True, frozen=True):
    """`is_ours`: the message is written for people and needs no class name.

    `where` is the file and line of the user's code at which it happened; empty when no user code was on the stack.
    """

    call_id: int
    kind: str
    detail: str
    traceback: str
    is_ours: bool
    where: str = ""


class Expired(msgspec.Struct, tag=True, frozen=True):
    """The call still waited at its time limit and was cancelled."""

    call_id: int


Order = Start | Cancel
Reply = Returned | Raised | Expired
ORDERS = msgspec.msgpack.Decoder(Order)
REPLIES = msgspec.msgpack.Decoder(Reply)
_LENGTH = struct.Struct("<Q")


async def read(
    stream: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Message], max_bytes: int | None = None
) -> Message:
    """Reads one message. Raises EOFError when the other side is gone, or wrote what is no message."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        if max_bytes is not None and length > max_bytes:
            raise EOFError(f"{length} bytes are more than {max_bytes}")
        return decoder.decode(await stream.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, RecursionError, ValueError) as error:
        raise EOFError from error


def packed(message: Order | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unreadable(Exception):
    """The result is not of the type that the function declares."""


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_ARRAY = 1
_ARRAY_KINDS = "biuf"


def encode(value: object) -> bytes:
    """Raises TypeError, ValueError, OverflowError or RecursionError for a value that cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode(function: Callable[..., Any], data: bytes) -> Any:
    """Decodes the result of `function`. Raises Unreadable, which says where it differs from the declared type."""
    return decode_as(_declared(function), data)


def decode_as(kind: Any, data: bytes) -> Any:
    """Decodes a value of the type `kind`. Raises Unreadable, which says where it differs."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise Unreadable(str(error)) from error


@cache
def _declared(function: Callable[..., Any]) -> Any:
    return get_type_hints(function)["return"]


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_array)


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor of torch, which is not imported here
        value = (value.detach().float() if value.is_floating_point() else value.detach()).cpu().numpy()
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"an array of {value.dtype} cannot leave its worker process")
        array = _Array(value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(array))
    raise TypeError(f"a {type(value).__name__} cannot leave its worker process: return plain values")


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"an extension of type {code}")
    array = msgspec.msgpack.decode(data, type=_Array)
    dtype = np.dtype(array.dtype)
    if dtype.kind not in _ARRAY_KINDS or math.prod(array.shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"an array of {dtype} and shape {array.shape} in {len(array.data)} bytes")
    return np.frombuffer(array.data, dtype).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class WorkerMain:
    """What multiprocessing's fork server runs in a new process, in place of a `multiprocessing.Process`.

    A `Process` would import the service's own main module again. The service's end of the channel and its stderr are
    the inherited descriptors.
    """

    environment: dict[str, str]

    def _bootstrap(self, parent_sentinel: int) -> NoReturn:
        """Serves calls until the channel closes. Nothing that user code registered or runs keeps it from ending."""
        try:
            channel, errors = _inherited()
            os.setsid()
            die_with_parent(os.getppid(), signal.SIGKILL)
            adopt_orphans()  # what user code starts stays below this process, and is found
            first_to_go()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
            for number in (1, 2):  # what user code prints belongs with the logs
                os.dup2(errors, number)
            os.close(errors)
            sys.stdout = sys.stderr  # it prints each line at once, and escapes what is no text
            os.environ.clear()
            os.environ.update(self.environment)
            os.register_at_fork(after_in_child=lambda: _disown(channel))
            asyncio.run(_serve(socket.socket(fileno=channel)))
            os._exit(0)
        except BaseException:  # noqa: BLE001  # printed, and the process ends
            traceback.print_exc()
        finally:
            os._exit(70)


def _inherited() -> Sequence[int]:
    """The descriptors that the service gave. User code that needs a fork server gets one of its own."""
    server: Any = forkserver._forkserver
    descriptors: Sequence[int] = server.get_inherited_fds()
    os.close(server._forkserver_alive_fd)  # the fork server ends when nobody holds it: its service alone must
    server.__init__()
    return descriptors


def _disown(descriptor: int) -> None:
    """A copy that user code forked shares the channel: it must neither read from it nor write to it."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, descriptor, inheritable=False)
    os.close(null)


async def _serve(channel: socket.socket) -> None:
    stream, writer = await asyncio.open_connection(sock=channel)
    calls = _Calls(writer)
    with suppress(EOFError):
        while True:
            match await read(stream, ORDERS):
                case Start() as start:
                    calls.start(start)
                case Cancel(call_id):
                    calls.cancel(call_id)


class _Calls:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pid = os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._was_shared = False
        self._known: set[int] = set()
        """Processes that ran below this one before the calls that run now."""
        self._cancelled: set[int] = set()

    def start(self, order: Start) -> None:
        self._was_shared = bool(self._tasks)
        if not self._tasks:
            self._known = set(children(self._pid)) if _has_children() else set()
        self._tasks[order.call_id] = asyncio.create_task(self._answer(order))

    def cancel(self, call_id: int) -> None:
        """Cancels a call that no caller waits for; one that has finished is ignored."""
        if call_id in self._tasks:
            self._cancelled.add(call_id)
            self._tasks[call_id].cancel()

    async def _answer(self, order: Start) -> None:
        reply = await self._run(order)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that user code forked and that came back here: the answer is the original's
        del self._tasks[order.call_id]
        self._cancelled.discard(order.call_id)
        if not self._tasks and not order.prepares and _has_children():
            reply = self._without_processes(reply, order.name)
        self._writer.write(packed(reply))
        with suppress(ConnectionError):  # the service has ended, and so does this worker
            await self._writer.drain()

    async def _run(self, order: Start) -> Reply:
        limit = asyncio.timeout(order.timeout_seconds)
        try:
            tracing.adopt_call(order.spans)
            async with limit:
                function, args = pickle.loads(order.work)  # noqa: S301  # the service's own function and arguments
                result = function(*args)
                if inspect.isawaitable(result):
                    result = await result
            data = encode(result)
        except BaseException as error:  # noqa: BLE001  # the boundary to user code: sys.exit() in a hook ends the call, not the worker
            if order.call_id in self._cancelled or (limit.expired() and isinstance(error, TimeoutError)):
                return Expired(order.call_id)  # in the first case nobody waits for it
            return _raised(order.call_id, error)
        if len(data) > MAX_HOOK_ANSWER_BYTES:
            detail = f"{len(data)} bytes are more than the {MAX_HOOK_ANSWER_BYTES} that a call may return"
            return Raised(order.call_id, "TooLarge", detail, "", False)
        return Returned(order.call_id, data)

    def _without_processes(self, reply: Reply, name: str) -> Reply:
        """Ends the processes that calls have left running. A call that ran alone is told of its own."""
        left = _left_running(self._pid, self._known)
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):  # it ended, and was waited for
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not left or self._was_shared or not isinstance(reply, Returned):
            return reply
        what = "a process" if len(left) == 1 else f"{len(left)} processes"
        detail = (
            f"{name} returned and left {what} (process id {', '.join(map(str, left[:8]))}) running: "
            "it must end the processes that it starts"
        )
        return Raised(reply.call_id, "LeftProcesses", detail, "", True)


# A process that was told to end, or whose pipe was closed, takes a moment to be gone.
_LEAVE_SECONDS = 0.3
_LONGEST_LEAVE_SECONDS = 5.0
"""For a process to which a busy machine gives no core."""
# Started by multiprocessing for the life of the process, not for a call.
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def _has_children() -> bool:
    """Waits for children that have ended: no other code will, now that their call has returned."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _left_running(pid: int, known: set[int]) -> list[int]:
    """Children that were started since, and run on after a moment."""
    began = time.monotonic()
    while left := [child for child in children(pid) if child not in known and not _is_helper(child)]:
        waited = time.monotonic() - began
        had_its_moment = waited > _LEAVE_SECONDS and not all(wants_a_core(child, _LEAVE_SECONDS) for child in left)
        if had_its_moment or waited > _LONGEST_LEAVE_SECONDS:
            break
        time.sleep(0.01)
        _has_children()
    return left


def _is_helper(pid: int) -> bool:
    try:
        command, own = (Path(f"/proc/{which}/cmdline").read_bytes() for which in (pid, "self"))
    except OSError:  # it ended meanwhile
        return True
    return command != own and any(helper in command for helper in _HELPERS)


_MESSAGE_CHARACTERS = 2_000
"""The limit for a report of an exception: its class, its message and where it was raised."""
_PLACE_CHARACTERS = 500
_TRACEBACK_CHARACTERS = 32_000
# Where code lies that its user did not write: headrace's own, and what Python and pip have installed.
_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _raised(call_id: int, error: BaseException) -> Raised:
    where = _printable(lambda: _where(error), _PLACE_CHARACTERS)
    kind = _printable(lambda: type(error).__name__, _PLACE_CHARACTERS)
    return Raised(
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
        said = text()[: characters + 1]
    except BaseException:  # noqa: BLE001  # user code prints itself
        return "(it cannot be printed)"
    cut = said if len(said) <= characters else said[:characters] + "…"
    return encodable(cut)
