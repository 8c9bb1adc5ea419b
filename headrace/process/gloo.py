"""The interface on which gloo listens: by itself where the machine's own name points, which is loopback on many."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from headrace.rpc.net import Address, resolved

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
