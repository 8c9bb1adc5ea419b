"""This process's TCP connections to one of its ports, as the kernel has them: gRPC shows its own to nobody."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_MAPPED = "::ffff:"


@dataclass(frozen=True, slots=True)
class Connection:
    """`peer` is written as gRPC writes it: `ipv4:HOST:PORT`, `ipv6:[HOST]:PORT`."""

    descriptor: int
    host: str
    peer: str


def num_descriptors() -> int:
    """Returns the number of files that this process has open: there are no more connections than that."""
    return os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))  # the size is their number from Linux 6.2 on


def connections_to(port: int) -> Iterator[Connection]:
    """Connections that others opened to a port of this process."""
    for name in os.listdir(_DESCRIPTORS):
        if (found := _connection(int(name), port)) is not None:
            yield found


def end(connection: Connection, port: int) -> bool:
    """Shuts it down, and its owner sees the end of it; False where the descriptor is another's by now."""
    try:
        copy = os.dup(connection.descriptor)
    except OSError:
        return False
    try:
        if _connection(copy, port) != Connection(copy, connection.host, connection.peer):
            return False
        with socket.socket(fileno=copy) as held, contextlib.suppress(OSError):
            copy = -1
            held.shutdown(socket.SHUT_RDWR)
        return True
    finally:
        if copy >= 0:
            os.close(copy)


def _connection(descriptor: int, port: int) -> Connection | None:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:  # it is no socket, or is closed by now
        return None
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return None
        host, peer_port = found.getpeername()[:2]
    except OSError:  # it listens, or has ended
        return None
    finally:
        found.detach()
    if ":" not in host or host.startswith(_MAPPED):
        host = host.removeprefix(_MAPPED)
        return Connection(descriptor, host, f"ipv4:{host}:{peer_port}")
    return Connection(descriptor, host, f"ipv6:[{host}]:{peer_port}")
