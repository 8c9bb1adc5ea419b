"""Where the processes of a run listen, as the kernel says it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.process.linux import descendants

_LISTEN = "0A"


def listening_of_tree(pid: int) -> dict[str, str]:
    """host:port of every TCP socket that the process or a descendant listens on, with the command that does."""
    return listening([pid, *descendants(pid)])


def listening(pids: Iterable[int]) -> dict[str, str]:
    """The same of these processes."""
    addresses = dict(_sockets())
    found = {}
    for pid in pids:
        for inode in _inodes(pid):
            if inode in addresses:
                found[addresses[inode]] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return found


def open_to_others(addresses: Iterable[str]) -> list[str]:
    """Those that other machines can reach."""
    return [each for each in addresses if not ipaddress.ip_address(each.rpartition(":")[0]).is_loopback]


def _sockets() -> Iterator[tuple[str, str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN:
                host, _, port = words[1].partition(":")
                yield words[9], f"{_host(host)}:{int(port, 16)}"


def _host(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Words of four bytes, each as the machine keeps them."""
    data = b"".join(bytes.fromhex(word)[::-1] for word in re.findall("." * 8, text))
    address = ipaddress.ip_address(data)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _inodes(pid: int) -> Iterator[str]:
    try:
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for handle in handles:
        try:
            target = os.readlink(handle)
        except OSError:
            continue
        if found := re.fullmatch(r"socket:\[(\d+)\]", target):
            yield found[1]
