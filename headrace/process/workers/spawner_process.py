"""`python -c … main(descriptor)`: forks workers for a pool, and leaves nothing of them behind.

consumes: Fork (with the worker's end of its channel) and Kill; produces: Forked, Ended, and NotForked.
Runs no user code and no thread. It is the subreaper of its workers: what they orphan becomes its own child, and a child
that is no worker is ended, before the end of a worker is told. Ends with everything below it when its pool is gone.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import socket
import time
from contextlib import suppress

import msgspec

from headrace.process.linux import adopt_orphans, children, die_with_parent, first_to_go
from headrace.process.workers import child

MAX_PACKET_BYTES = 4096
_SWEEP_SECONDS = 5.0
# Most workers need it: imported once here, it costs them nothing.
_IMPORTED_FIRST = "headrace.hooks"


class Fork(msgspec.Struct, tag=True):
    """Start a worker; its channel comes with the packet."""

    secret: bytes


class Kill(msgspec.Struct, tag=True):
    """Kill a worker and everything that it started."""

    pid: int


class Forked(msgspec.Struct, tag=True):
    """The worker with this secret runs."""

    secret: bytes
    pid: int


class NotForked(msgspec.Struct, tag=True):
    """The kernel refused a process."""

    secret: bytes
    message: str


class Ended(msgspec.Struct, tag=True):
    """A worker ended, and nothing of it is left; `returncode` is negative for a signal."""

    pid: int
    returncode: int


Command = Fork | Kill
Event = Forked | NotForked | Ended


def main(descriptor: int) -> None:
    """Serves until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    importlib.import_module(_IMPORTED_FIRST)
    Spawning(socket.socket(fileno=descriptor)).run()


class Spawning:
    """Tracks the workers by process id."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: set[int] = set()
        self._wakeup, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until the pool is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._command():
                        return self._end_all()
                else:
                    os.read(self._wakeup, MAX_PACKET_BYTES)
            self._reap()

    def _command(self) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        except ConnectionError:
            return False
        if not packet:
            return False
        match msgspec.msgpack.decode(packet, type=Command):
            case Fork(secret):
                self._fork(secret, descriptors[0])
            case Kill(pid) if pid in self._workers:
                os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, secret: bytes, channel: int) -> None:
        spawner = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(channel)
            return self._tell(NotForked(secret, f"a worker process cannot be started: {error.strerror}"))
        if pid == 0:
            self._become_worker(spawner, secret, channel)
        os.close(channel)
        self._workers.add(pid)
        return self._tell(Forked(secret, pid))

    def _become_worker(self, spawner: int, secret: bytes, channel: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._control.close()
            os.close(self._wakeup)
            os.close(self._woken)
            os.setsid()
            die_with_parent(spawner, signal.SIGKILL)
            adopt_orphans()
            first_to_go()
            child.main(socket.socket(fileno=channel), secret)
        finally:
            os._exit(71)

    def _reap(self) -> None:
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._workers.remove(pid)
                self._sweep()
                self._tell(Ended(pid, os.waitstatus_to_exitcode(status)))
        if not self._workers:
            self._sweep()

    def _sweep(self) -> None:
        """Kills every child that is not a worker, and then the children that these orphan."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while strays := [pid for pid in children(os.getpid()) if pid not in self._workers]:
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        self._bury()

    def _bury(self) -> None:
        """Waits for orphans that have ended, so that their ids are free again."""
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._workers:
                    return  # its own turn comes
                os.waitpid(found.si_pid, 0)

    def _end_all(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        self._workers.clear()
        self._sweep()

    def _tell(self, event: Event) -> None:
        with suppress(ConnectionError):  # the pool is gone: the next read says so
            self._control.send(msgspec.msgpack.encode(event))
