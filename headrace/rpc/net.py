"""Addresses: parsing, free ports, which ones strangers reach; keepalive; which engine takes a request."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, Unavailable
from headrace.limits import LAST_PORT, shown, whole_number

_NAMED_PORTS = range(15_000, 32_000)
"""Below Linux's net.ipv4.ip_local_port_range."""
_TRIES = 50
_BACKLOG = 1024


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


# The times after which a silent connection is asked whether its other side is there, and given up without an answer.
#
# A peer that vanished (its cable was cut, its machine lost power) sends no FIN: only silence tells. Both sides ask,
# also while no call is open, so a call without an end, as a watch, hears of it too.

ASK_SECONDS = 30.0
ACKNOWLEDGED_SECONDS = 10.0
"""A connection ends when the other side's kernel has acknowledged nothing for this long."""

ANSWER_SECONDS = 20.0
"""The same where the kernel acknowledges but no answer comes. Answers queue behind data, for seconds on a slow line."""

CONNECT_SECONDS = 5.0
"""A connection that is not up by then is begun again: five round trips of a far line, and a lost packet or two."""


def keepalive_options() -> Sequence[tuple[str, int]]:
    """The options that both sides of a gRPC connection have in common."""
    return [
        ("grpc.keepalive_time_ms", _ms(ASK_SECONDS)),
        ("grpc.keepalive_timeout_ms", _ms(ACKNOWLEDGED_SECONDS)),
        ("grpc.http2.ping_timeout_ms", _ms(ANSWER_SECONDS)),  # a minute otherwise
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # gRPC would ask twice, and then once a minute
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


_HEADER = "X-SMG-Routing-Key"


def routed_by(key: str | None) -> Mapping[str, str]:
    """The headers of a request. A digest, because a key may be long, secret, or nothing that a header can hold."""
    return {} if key is None else {_HEADER: hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}
