"""Errors of a call in a worker.

WorkerError
├── WorkerTimeout   it took longer than its limit; the worker was killed if it did not stop by itself
├── WorkerCrashed   its process died
├── WorkerBroken    it closed the worker's channel to its service, or wrote to it; the worker was killed
└── WorkerRaised    it raised, returned a value that cannot be sent or read, or left processes behind
"""

from __future__ import annotations

import signal


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


class WorkerBroken(WorkerError):
    """The call closed or wrote to the channel between its process and the service; `what` says which."""

    def __init__(self, function: str, what: str) -> None:
        super().__init__(f"{function} {what}, which only headrace may use: its worker process was ended")


class WorkerRaised(WorkerError):
    """The call raised an exception of class `kind`; `is_ours` when that is of `headrace.errors`' tree.

    `where` is the file and line of the user's code, if it went through any.
    """

    def __init__(self, function: str, kind: str, detail: str, traceback: str, is_ours: bool, where: str = "") -> None:
        at = f" ({where})" if where else ""
        super().__init__(detail if is_ours else f"{function} raised {kind}: {detail}".rstrip(": ") + at)
        self.kind = kind
        self.is_ours = is_ours
        self.detail = detail
        self.traceback = traceback


class WorkerLeftProcesses(WorkerRaised):
    """The call left processes running that it had started; they were ended, and its result is not used."""

    def __init__(self, function: str, processes: str) -> None:
        message = f"{function} returned and left {processes} running: it must end the processes that it starts"
        super().__init__(function, "LeftProcesses", message, "", is_ours=True)


class WorkerReturnedUnreadable(WorkerRaised):
    """The call returned another type than its kind of function returns."""

    def __init__(self, function: str, detail: str) -> None:
        message = f"{function} returned a value that cannot be used: {detail}"
        super().__init__(function, "Unreadable", message, "", is_ours=True)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    names = {int(number): number.name for number in signal.Signals}
    killed = " (killed: out of memory?)" if returncode == -signal.SIGKILL else ""
    return names.get(-returncode, f"signal {-returncode}") + killed
