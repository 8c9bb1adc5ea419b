"""`python -m headrace.process.guard PARENT GRACE_SECONDS COMMAND…`: runs a command, and leaves nothing behind.

running → (SIGTERM, or the parent's death) → stopping: SIGTERM and SIGCONT to the command, and patience: until a second
    signal while the parent lives, GRACE_SECONDS without it → sweeping
running → (SIGUSR1) → sweeping, without patience
running → (the command ends) → sweeping: SIGTERM, a little patience and SIGKILL to every descendant that is left → exit
Orphans of the command (engines, ranks) are adopted, so even `kill -9` of it leaves none; `kill -9` of the guard
is one of the command, too. The exit code is its own; 128 + n when signal n ended it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

from headrace.process.linux import adopt_orphans, descendants, die_with_parent, runs

_MODULE = "headrace.process.guard"
_SWEEP_SECONDS = 3.0
_LOOK_SECONDS = 0.2
SWEEP_NOW = signal.SIGUSR1
"""Makes the guard kill the command and its descendants."""

UNDER_RAY = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Variables of an actor that starts a guard: Ray would kill the guard at the actor's end, and the guard does better."""

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, SWEEP_NOW}


def guard_command(grace_seconds: float, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` under a guard of this process."""
    return [sys.executable, "-m", _MODULE, str(os.getpid()), str(grace_seconds), *command]


def orphaned_guards() -> Iterator[tuple[psutil.Process, Sequence[str]]]:
    """This user's guards whose parent has ended, so that they are ending their command, with that command."""
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []  # nothing of another user's
        if words[1:3] == ["-m", _MODULE] and words[3] != str(process.info["ppid"]):
            yield process, words[5:]


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    parent, grace_seconds, command = int(argv[0]), float(argv[1]), argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # they are waited for, not handled
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    guard = os.getpid()
    # It has the sockets that the parent passed on; everything else of this process is not inheritable.
    child = subprocess.Popen(command, process_group=0, close_fds=False, preexec_fn=lambda: _before_exec(guard))
    print(f"pid {child.pid}", flush=True)  # noqa: T201  # the parent reads it
    os.dup2(2, 1)  # nothing more goes to the parent
    code, asked = _wait(child.pid, None)
    if code is None and asked != SWEEP_NOW:
        for number in (signal.SIGTERM, signal.SIGCONT):  # one that was stopped has to go on to end
            os.kill(child.pid, number)  # not buried yet: the id is still its own
        code = _wait_patiently(child.pid, parent, grace_seconds)
    _sweep(0.0 if code is None else _SWEEP_SECONDS)
    return 128 + signal.SIGKILL if code is None else code


def _before_exec(guard: int) -> None:
    os.dup2(2, 1)  # the command's output is its log
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    die_with_parent(guard, signal.SIGKILL)  # nobody would wait for its end


def _wait_patiently(pid: int, parent: int, grace_seconds: float) -> int | None:
    """The exit code of a command that was asked to end; None when its time is up.

    Of a parent with threads the kernel tells the end several times, once for each thread: only a signal while the
    parent lives is its second one.
    """
    deadline = None
    while True:
        if deadline is None and not _lives(parent):
            deadline = time.monotonic() + grace_seconds
        code, asked = _wait(pid, None if deadline is None else deadline - time.monotonic())
        if code is not None or asked in (None, SWEEP_NOW) or _lives(parent):
            return code


def _lives(parent: int) -> bool:
    return os.getppid() == parent and runs(parent)


def _wait(pid: int, seconds: float | None) -> tuple[int | None, int | None]:
    """The command's exit code, or the signal that asked to stop; neither when the time passed."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while (code := _reap(pid)) is None:
        left = 3600.0 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return None, None
        received = signal.sigtimedwait(_WATCHED, left)
        if received and received.si_signo != signal.SIGCHLD:
            return None, received.si_signo
    return code, None


def _reap(pid: int) -> int | None:
    """Buries every child that has ended; returns the command's exit code if it is among them."""
    code = None
    with suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                number = os.waitstatus_to_exitcode(ended[1])
                code = 128 - number if number < 0 else number
    return code


def _sweep(patience: float) -> None:
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _SWEEP_SECONDS)):
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            _reap(-1)
            if not descendants(os.getpid()):
                return
            signal.sigtimedwait({signal.SIGCHLD}, min(left, _LOOK_SECONDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
