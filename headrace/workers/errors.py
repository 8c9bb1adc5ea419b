"""How a call in a worker can fail.

WorkerError
├── WorkerTimeout   it took longer than its limit; the worker was killed if it did not stop by itself
├── WorkerCrashed   the process died under it
└── WorkerRaised    it raised; the traceback is in the log
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
        how = f"exit code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name
        super().__init__(f"{function} ended its worker process with {how}")
        self.returncode = returncode


class WorkerRaised(WorkerError):
    """The call raised an exception of class `kind`; `is_ours` when that is of `headrace.errors`' tree."""

    def __init__(self, function: str, kind: str, detail: str, traceback: str, is_ours: bool) -> None:
        super().__init__(detail if is_ours else f"{function} raised {kind}: {detail}".rstrip(": "))
        self.kind = kind
        self.is_ours = is_ours
        self.detail = detail
        self.traceback = traceback
