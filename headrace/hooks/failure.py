"""The failure of samples whose call of a user's function ended badly."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.process.workers import WorkerCrashed, WorkerError, WorkerTimeout
from headrace.trajectory import Failure


def call_failure(error: WorkerError | HeadraceError) -> Failure:
    """Returns the failure of all samples of a call that ended so; its reason is for programs."""
    if isinstance(error, HeadraceError):
        return Failure(error.reason, error.message)
    if isinstance(error, WorkerTimeout):
        return Failure("HOOK_TIMEOUT", error.message)
    return Failure("HOOK_CRASHED" if isinstance(error, WorkerCrashed) else "HOOK_RAISED", error.message)
