"""A caller's name and roles, from what its certificate says.

A role is a URI among a certificate's alternative names, `urn:headrace:role:viewer`; gRPC gives those as they were
signed, so nothing is parsed. The services' certificate has none, and the name `headrace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.rpc.access.roles import OF_CLIENTS, Role
from headrace.rpc.tls import SERVICE_NAME

_URN = "urn:headrace:role:"
_OF_URN = {f"{_URN}{role}".encode(): role for role in OF_CLIENTS}

Peer = Mapping[str, Iterable[bytes]]
"""A connection's auth context, as gRPC gives it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is for the log. Each of `roles` must allow a call; a caller without one may call nothing."""

    name: str
    roles: tuple[Role, ...]
    has_unknown_token: bool = False
    is_revoked: bool = False

    @property
    def role(self) -> str:
        """The roles, for a log and a message."""
        return "+".join(self.roles) or "none"


def urn_of(role: Role) -> str:
    """The alternative name that a certificate of that role has."""
    return f"{_URN}{role}"


def of_certificate(peer: Peer) -> Caller:
    """The authority vouches for what it says. Two roles in one certificate are none: which one counts is unclear."""
    names = list(peer.get("x509_common_name", ()))
    name = b", ".join(names).decode(errors="replace")
    found = [_OF_URN[uri] for uri in peer.get("peer_uri", ()) if uri in _OF_URN]
    if not found and names == [SERVICE_NAME.encode()]:
        return Caller(name, (Role.SERVICE,))
    return Caller(name, tuple(found) if len(found) == 1 else ())
