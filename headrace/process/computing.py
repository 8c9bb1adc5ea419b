"""Variables of processes that compute: OpenMP's threads, gloo's interface. Those that are set stay as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from headrace.rpc.net import Address, resolved

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


# The interface on which gloo listens: by itself where the machine's own name points, which is loopback on many.


_INTERFACE = "GLOO_SOCKET_IFNAME"


def gloo_at(host: str, named: Mapping[str, str]) -> dict[str, str]:
    """The variables with which gloo listens at `host`, an address or a name of this machine.

    There are none where no interface has it, and where one is `named` already. Raises Unavailable for an unknown name.
    """
    if _INTERFACE in named:
        return {}
    found = (interface_of(str(where[0])) for *_, where in resolved(Address(host, 0)))
    return next(({_INTERFACE: interface} for interface in found if interface is not None), {})


def interface_of(host: str) -> str | None:
    """The name of this machine's interface that has the address; None where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == host.partition("%")[0] for each in addresses):
            return str(name)
    return None
