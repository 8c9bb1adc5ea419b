"""Waits for what a launcher that was killed has left: guards end its services in order, which takes a step at most.

A start beside them would find the ledger, the ports and the devices taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headrace.errors import FailedPrecondition
from headrace.launch.grace import GRACE_SECONDS
from headrace.process.guard import orphans
from headrace.run_folder import RunFolder

_PATIENCE_SECONDS = 3 * GRACE_SECONDS
"""The guards' own patience, their sweep, and a busy machine."""
_POLL_SECONDS = 0.1


def outlast_leftovers(
    folder: RunFolder, services: Sequence[str], tell: Callable[[str], None], patience_seconds: float = _PATIENCE_SECONDS
) -> None:
    """Returns when no launcher that has ended has left any of these services of the run on this machine.

    Raises FailedPrecondition when they stay.
    """
    end, told = time.monotonic() + patience_seconds, False
    while left := leftovers(folder, services):
        pids = " ".join(map(str, left))
        if time.monotonic() > end:
            raise FailedPrecondition(
                f"processes of an earlier start of run {folder.path} do not end: kill -9 {pids}, and repeat the command"
            )
        if not told:
            told = True
            tell(f"{folder.path}: waiting for the end of what an earlier start has left, processes {pids}")
        time.sleep(_POLL_SECONDS)


def leftovers(folder: RunFolder, services: Sequence[str]) -> Sequence[int]:
    """The guards' process ids; a guard is the last to go of its service."""
    programs = {f"services.{service}" for service in services}
    jobs = {file.absolute() for file in (folder.job_file, *map(folder.config_of, services))}
    return [
        each.pid
        for each in orphans()
        if programs.intersection(each.command) and jobs & {each.folder / word for word in each.command}
    ]
