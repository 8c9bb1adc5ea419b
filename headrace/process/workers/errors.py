"""How a call in a worker can fail.

WorkerError
├── WorkerTimeout   it took longer than its limit; the worker was killed if it did not stop by itself
├── WorkerCrashed   the process died under it
├── WorkerBroken    it closed the worker's channel to its service, or wrote to it; the worker was killed
└── WorkerRaised    it raised, returned what cannot be sent or read, or left processes behind
"""

from __future__ import annotations

import signal


class WorkerError(Exception):
    """Base of all: one sentence for a person."""

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
    """The call did something to the channel between its process and the service; `what` says what."""

    def __init__(self, function: str, what: str) -> None:
        super().__init__(f"{function} {what}, which is headrace's own: its worker process was ended")


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
    """The call returned while `processes` that it had started ran on; they were ended, its return is unused."""

    def __init__(self, function: str, processes: str) -> None:
        message = f"{function} returned and left {processes} running: it must end what it starts"
        super().__init__(function, "LeftProcesses", message, "", is_ours=True)


class WorkerReturnedUnreadable(WorkerRaised):
    """The call returned something else than its kind of function returns."""

    def __init__(self, function: str, detail: str) -> None:
        message = f"{function} returned what cannot be used: {detail}"
        super().__init__(function, "Unreadable", message, "", is_ours=True)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    names = {int(number): number.name for number in signal.Signals}
    return names.get(-returncode, f"signal {-returncode}")
