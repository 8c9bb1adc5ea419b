"""The pool's side of the process that forks its workers. It is started when needed, and again after it ended.

A worker costs a fork, not an interpreter's start, and a crash of one costs little. When the spawner is killed (user
code may do that), its workers end with it; processes that they started elsewhere are found by a mark in their
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import msgspec

from headrace.errors import Unavailable
from headrace.process.linux import marked
from headrace.process.workers.frame import SECRET_BYTES
from headrace.process.workers.spawner_process import (
    MAX_PACKET_BYTES,
    Command,
    Ended,
    Event,
    Fork,
    Forked,
    Kill,
    NotForked,
)
from headrace.rpc.proxies import direct_to

_MARK = "HEADRACE_WORKER_OF"
_END_SECONDS = 10.0
_START_SECONDS = 120.0
_TRIES = 5
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from headrace.process.workers.spawner_process import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker's process. `ended` gets its return code when nothing of it is left."""

    pid: int
    channel: socket.socket
    secret: bytes
    ended: asyncio.Future[int]


@dataclass
class _Running:
    process: asyncio.subprocess.Process
    control: socket.socket
    mark: str
    listening: asyncio.Task[None] | None = None
    asked: dict[bytes, asyncio.Future[Spawned]] = field(default_factory=dict)
    channels: dict[bytes, socket.socket] = field(default_factory=dict)
    workers: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    gone: bool = False


class Spawner:
    """Forks workers and ends them."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._lock = asyncio.Lock()

    async def spawn(self) -> Spawned:
        """Starts a new worker. Raises Unavailable when the machine cannot start a process."""
        for _ in range(_TRIES):  # user code of a neighbour may end the spawner meanwhile
            async with self._lock:
                if self._running is None or self._running.gone:
                    self._running = await _start()
                running = self._running
            with contextlib.suppress(_Gone):
                return await _ask(running)
        raise Unavailable("the process that forks workers ended several times in a row; see its output in the log")

    def kill(self, spawned: Spawned) -> None:
        """Kills the worker without waiting for its end."""
        if self._running and not spawned.ended.done():
            _send(self._running, Kill(spawned.pid), None)

    async def end(self, spawned: Spawned) -> None:
        """Kills the worker and everything that it started; returns when all of it is gone."""
        running = self._running
        if spawned.ended.done() or running is None:
            return
        self.kill(spawned)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(spawned.ended)
                return
        await self._abandon(running)  # user code stopped it, or keeps it busy

    async def close(self) -> None:
        """Ends the spawner and its remaining workers."""
        running = self._running
        if running is None:
            return
        if not running.gone:
            running.control.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(_END_SECONDS):
                await running.process.wait()
        except TimeoutError:
            await self._abandon(running)
        if running.listening:
            await running.listening

    async def _abandon(self, running: _Running) -> None:
        with contextlib.suppress(ProcessLookupError):
            running.process.kill()
        await running.process.wait()
        if running.listening:
            await running.listening


class _Gone(Exception):
    """The spawner ended before it answered."""


async def _ask(running: _Running) -> Spawned:
    secret = secrets.token_bytes(SECRET_BYTES)
    ours, theirs = socket.socketpair()
    asked: asyncio.Future[Spawned] = asyncio.get_running_loop().create_future()
    running.asked[secret] = asked
    running.channels[secret] = ours
    with theirs:
        _send(running, Fork(secret), theirs)
    async with asyncio.timeout(_START_SECONDS):
        return await asked


async def _start() -> _Running:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mark = secrets.token_hex(8)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _BOOTSTRAP,
            str(theirs.fileno()),
            json.dumps(sys.path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # what user code prints belongs with the logs
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, **direct_to(), _MARK: mark},
        )
    ours.setblocking(False)
    running = _Running(process, ours, mark)
    running.listening = asyncio.create_task(_listen(running))
    return running


async def _listen(running: _Running) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while packet := await loop.sock_recv(running.control, MAX_PACKET_BYTES):
            _take(running, msgspec.msgpack.decode(packet, type=Event))
    running.gone = True
    running.control.close()
    await running.process.wait()
    await asyncio.to_thread(_end_marked, running.mark)
    for ended in running.workers.values():
        ended.set_result(-signal.SIGKILL)
    for secret in list(running.asked):
        _refuse(running, secret, _Gone())


def _take(running: _Running, event: Event) -> None:
    match event:
        case Forked(secret, pid):
            running.workers[pid] = ended = asyncio.get_running_loop().create_future()
            asked, channel = running.asked.pop(secret), running.channels.pop(secret)
            if asked.done():  # its caller was cancelled
                channel.close()
                _send(running, Kill(pid), None)
            else:
                asked.set_result(Spawned(pid, channel, secret, ended))
        case NotForked(secret, message):
            _refuse(running, secret, Unavailable(message))
        case Ended(pid, returncode):
            running.workers.pop(pid).set_result(returncode)


def _refuse(running: _Running, secret: bytes, error: Exception) -> None:
    running.channels.pop(secret).close()
    asked = running.asked.pop(secret)
    if not asked.done():
        asked.set_exception(error)


def _end_marked(mark: str) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while (found := marked(_MARK, mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _send(running: _Running, command: Command, channel: socket.socket | None) -> None:
    packet = msgspec.msgpack.encode(command)
    with contextlib.suppress(ConnectionError, OSError):  # it ended: `_listen` says so to everyone
        socket.send_fds(running.control, [packet], [channel.fileno()] if channel else [])
