"""OpenMP's settings for a process that computes on CPU cores. The caller's environment takes precedence."""

from __future__ import annotations

import os

_SPINS = "1000"
"""How often a thread looks whether the others have come before it sleeps, some ten microseconds.

libgomp's own number is three hundred times larger: nothing is won by it on cores of one's own, and where another
program has one of the cores, threads burn theirs while they wait for it.
"""


def openmp(threads: int) -> dict[str, str]:
    """The variables to add to the environment. A wait policy that is set decides about spinning, too."""
    wanted = {"OMP_NUM_THREADS": str(threads)}
    if "OMP_WAIT_POLICY" not in os.environ:
        wanted["GOMP_SPINCOUNT"] = _SPINS
    return {name: value for name, value in wanted.items() if name not in os.environ}


def threads_of_each(processes: int, *, share: float = 1.0) -> int:
    """Threads of each when `processes` divide a share of the cores that this process may use; at least one."""
    return max(1, int(len(os.sched_getaffinity(0)) * share) // processes)
