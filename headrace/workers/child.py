"""The worker's half. Functions run in the main thread (libraries use SIGALRM there); coroutines share its event loop.

consumes: Start and Cancel from its parent; produces: one reply for every Start.
Ends when the parent is gone: by end of file while it waits, by the kernel's signal while it computes.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import pickle
import signal
import socket
import sys
import traceback
from functools import partial

from headrace.errors import HeadraceError
from headrace.workers import frame

_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Serves calls from the socket behind `descriptor` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(parent: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=parent)
    tasks: dict[int, asyncio.Task[None]] = {}
    while True:
        try:
            message = await frame.read(reader)
        except EOFError:
            return
        match message:
            case frame.Start(call_id):
                task = asyncio.create_task(_answer(message, writer))
                tasks[call_id] = task
                task.add_done_callback(partial(_forget, tasks, call_id))
            case frame.Cancel(call_id) if call_id in tasks:
                tasks[call_id].cancel()


def _forget(tasks: dict[int, asyncio.Task[None]], call_id: int, _: asyncio.Task[None]) -> None:
    del tasks[call_id]


async def _answer(start: frame.Start, writer: asyncio.StreamWriter) -> None:
    writer.write(frame.encode(await _run(start)))
    await writer.drain()


async def _run(start: frame.Start) -> frame.Reply:
    limit = asyncio.timeout(start.timeout_seconds)
    try:
        async with limit:
            function, args = pickle.loads(start.work)
            result = function(*args)
            if inspect.isawaitable(result):
                result = await result
        return frame.Returned(start.call_id, pickle.dumps(result))
    except asyncio.CancelledError:  # nobody waits for it; the reply frees its place in the parent's book
        return frame.Expired(start.call_id)
    except BaseException as error:  # the boundary to user code: sys.exit() in a hook ends the call, not the worker
        if limit.expired() and isinstance(error, TimeoutError):
            return frame.Expired(start.call_id)
        is_ours = isinstance(error, HeadraceError)
        return frame.Raised(start.call_id, type(error).__name__, str(error), traceback.format_exc(), is_ours)
