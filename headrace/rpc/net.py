"""Addresses: parsing, free ports, and which of them strangers can reach."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.digits import whole_number
from headrace.errors import ConfigError, Unavailable
from headrace.wire.checks import shown
from headrace.wire.limits import LAST_PORT

_NAMED_PORTS = range(15_000, 32_000)
"""Below Linux's net.ipv4.ip_local_port_range."""
_TRIES = 50
_BACKLOG = 1024
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, slots=True)
class Address:
    """`host:port`; port 0 asks for any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError unless it is host:port with a port of 0 to 65535."""
        host, colon, port = text.rpartition(":")
        number = whole_number(port, LAST_PORT)
        if not colon or not host or number is None:
            raise ConfigError(f"address {shown(text)} is not host:port, e.g. 127.0.0.1:9000")
        return cls(host.strip("[]"), number)

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def from_here(self) -> Address:
        """The address of a server that listens here, for callers of this machine: all interfaces include loopback."""
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host)  # noqa: S104  # asked for, not chosen
        return self if loopback is None else Address(loopback, self.port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def own_place(address: str) -> Address:
    """The place of `host:port|host:port` that is this machine's. Raises ConfigError where none is."""
    places = [Address.parse(place) for place in address.split("|")]
    if len(places) == 1:
        return places[0]
    for place in places:
        if is_ours(place.host):
            return place
    raise ConfigError(f"no place of {address} is an address of this machine: name the one that is, or add it")


def is_ours(host: str) -> bool:
    """True for an address of this machine. Raises Unavailable for a name that has none."""
    for family, kind, protocol, _, where in resolved(Address(host, 0)):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(where)
            return True
    return False


def resolved(address: Address) -> Sequence[tuple[int, int, int, str, Any]]:
    """The meanings of a host name, as getaddrinfo answers them. Raises Unavailable for one that has none."""
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"{address.host} is no name of a machine here: {error.strerror or error}") from error


def host_towards(peer: Address) -> str:
    """This machine's address on the way to the peer, which is one that the peer can answer to; nothing is sent.

    A machine's own name may mean 127.0.1.1, or an interface that the peer does not see.
    """
    for family, _, _, _, where in resolved(peer):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    raise Unavailable(f"there is no way from this machine to {peer}: see its routes")


def interface_of(host: str) -> str | None:
    """The name of this machine's interface that has the address; None where none has."""
    if ":" in host:
        return _interface_of_ipv6(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _INTERFACE_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return None


def _interface_of_ipv6(host: str) -> str | None:
    """Linux lists them: an address as 32 hexadecimal digits first, its interface last."""
    digits = ipaddress.ip_address(host.partition("%")[0]).packed.hex()
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if address == digits:
                return name
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free, of those that the kernel gives to nobody who does not name one.

    A service may listen there minutes later: any other port would by then be some outgoing connection's. For a minute
    no other call of this function finds it, in this process or another of this machine.
    """
    family = _family(host)
    for port in secrets.SystemRandom().sample(_NAMED_PORTS, _TRIES):
        try:
            with socket.socket(family) as probe:
                probe.bind((host, port))  # without SO_REUSEADDR: neither somebody's nor set aside
            _set_aside(host, port, family)
        except OSError:  # somebody has it
            continue
        return port
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    """The family to listen with; IPv4 for a name that has both. Raises OSError for a name without an address."""
    families = {row[0] for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def _set_aside(host: str, port: int, family: socket.AddressFamily) -> None:
    """Leaves a closed connection there, which keeps the port from all who do not say SO_REUSEADDR; servers say it.

    Raises OSError when somebody was faster.
    """
    with (
        socket.create_server((host, port), family=family, backlog=1) as server,
        socket.create_connection((host, port), timeout=1.0),
    ):
        server.accept()[0].close()  # the side that closes first waits (TIME_WAIT, 60 s on Linux)


def require_reachable(address: Address) -> None:
    """Raises ConfigError for a host name that means loopback on this machine, as its own does in many /etc/hosts."""
    if address.is_loopback or _is_numeric(address.host):
        return
    found = {str(row[4][0]) for row in resolved(address)}
    if all(Address(host, 0).is_loopback for host in found):
        raise ConfigError(
            f"{address.host} means {', '.join(sorted(found))} on this machine, where no other reaches it: pass "
            "--listen-host 0.0.0.0 (:: for IPv6) or one of its addresses, and leave the name to the others"
        )


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def listener(address: Address) -> socket.socket:
    """A socket that listens there; at `::` for IPv4 too, where the machine does so. Raises OSError."""
    listening = socket.socket(_family(address.host), socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def require_free(address: Address) -> None:
    """Raises Unavailable when somebody listens there; gRPC's own message does not say so."""
    if address.port == 0:
        return
    try:
        with socket.socket(_family(address.host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {address}: {error.strerror or error}: choose another --address, or port 0 for any"
        ) from error
