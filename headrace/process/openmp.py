"""OpenMP's settings of a process that computes on CPU cores. What the caller's environment says wins."""

from __future__ import annotations

import os

_SPINS = "1000"
"""How often a thread looks whether the others have come before it sleeps, some ten microseconds.

libgomp's own number is three hundred times larger: nothing is won by it on cores of one's own, and where another
program has one of the cores, threads burn theirs while they wait for it.
"""


def openmp(threads: int) -> dict[str, str]:
    """What to add to the environment, for so many threads. A wait policy that is set decides about spinning, too."""
    wanted = {"OMP_NUM_THREADS": str(threads)}
    if "OMP_WAIT_POLICY" not in os.environ:
        wanted["GOMP_SPINCOUNT"] = _SPINS
    return {name: value for name, value in wanted.items() if name not in os.environ}


def threads_of_each(processes: int, *, share: float = 1.0) -> int:
    """When `processes` divide that share of the cores that this one may use; one at least."""
    return max(1, int(len(os.sched_getaffinity(0)) * share) // processes)
