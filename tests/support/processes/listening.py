"""Where the processes of a run listen, as the kernel says it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import psutil

from headrace.process.linux import descendants


def listening_of_tree(pid: int) -> dict[str, str]:
    """host:port of every TCP socket that the process or a descendant listens on, with the command that does."""
    return listening([pid, *descendants(pid)])


def listening(pids: Iterable[int]) -> dict[str, str]:
    """The same of these processes."""
    found = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    host = ipaddress.ip_address(each.laddr.ip)
                    found[f"{getattr(host, 'ipv4_mapped', None) or host}:{each.laddr.port}"] = " ".join(
                        process.cmdline()
                    )[:200]
    return found


def open_to_others(addresses: Iterable[str]) -> list[str]:
    """Those that other machines can reach."""
    return [each for each in addresses if not ipaddress.ip_address(each.rpartition(":")[0]).is_loopback]
