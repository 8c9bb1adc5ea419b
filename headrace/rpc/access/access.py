"""Decides a call before its request is read: who calls, and whether that caller's roles may call this.

A revoked certificate      nothing is allowed, whatever token is beside it
Certificate with a role    its role; with a token beside it both roles must allow the call
Certificate without one    the token's role; without a token nothing is allowed
The services' certificate  the role `service`; a token beside it is not looked at
No certificates (loopback) the token's role
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from headrace.disk import WatchedFile
from headrace.errors import ConfigError, HeadraceError, PermissionDenied, Unauthenticated
from headrace.rpc.access.caller import Caller, Peer, of_certificate
from headrace.rpc.access.revoked import Revoked
from headrace.rpc.access.roles import Role, roles_of
from headrace.rpc.access.tokens_file import Entry, digest_of, entries_in
from headrace.rpc.log import log

AUTHORIZATION = "authorization"
SCHEME = "Bearer "

Metadata = Iterable[tuple[str, str | bytes]]


class Tokens:
    """The tokens of the job's file as it is now: a new or a revoked one needs no restart."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is not there, or is not of tokens."""
        self._file = WatchedFile(path, entries_in)
        self._refused: str | None = None

    def caller_of(self, token: str) -> Caller | None:
        """None for a token that is not in the file, and for all of them while the file cannot be read."""
        try:
            entries = self._file.content()
        except ConfigError as error:
            if error.message != self._refused:
                log.warning("tokens_not_read", error=error.message)
            self._refused = error.message
            return None
        self._refused = None
        return _found(entries.items(), digest_of(token))


def _found(entries: Iterable[tuple[str, Entry]], digest: str) -> Caller | None:
    """Compares with each of them, and in constant time: how long it takes tells nothing."""
    found = None
    for name, entry in entries:
        if hmac.compare_digest(entry.sha256, digest):
            found = Caller(name, (entry.role,))
    return found


def token_in(metadata: Metadata) -> str | None:
    """The bearer token that came with a call; None without one. Two of them are one that nobody has."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if not values:
        return None
    value = values[0] if len(values) == 1 else ""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text[len(SCHEME) :].strip() if text[: len(SCHEME)].lower() == SCHEME.lower() else ""


_NOBODY = Caller("", ())


class Access:
    """Open, as on loopback, where a server has neither certificates nor tokens."""

    def __init__(self, *, has_certificates: bool, tokens: Tokens | None, revoked: Revoked | None = None) -> None:
        self._has_certificates = has_certificates
        self._tokens = tokens
        self._revoked = revoked

    @classmethod
    def of(cls, tls_folder: Path | None, tokens: Tokens | None) -> Access:
        """Raises ConfigError for a file of revoked certificates that is there and cannot be used."""
        revoked = Revoked(tls_folder) if tls_folder else None
        return cls(has_certificates=tls_folder is not None, tokens=tokens, revoked=revoked)

    @property
    def is_open(self) -> bool:
        """True where every client that connects may call everything."""
        return not self._has_certificates and self._tokens is None

    def caller(self, peer: Peer, metadata: Metadata) -> Caller:
        """Returns the caller, without roles where it has shown none; never raises, so that a refusal can name it."""
        shown = of_certificate(peer) if self._has_certificates else _NOBODY
        if self._revoked is not None and self._revoked.includes(peer):
            return Caller(shown.name, (), is_revoked=True)
        token = token_in(metadata)
        if self._tokens is None or token is None or Role.SERVICE in shown.roles:
            return shown
        found = self._tokens.caller_of(token)
        if found is None:
            return Caller(shown.name, (), has_unknown_token=True)
        names = [name for name in dict.fromkeys((shown.name, found.name)) if name]
        return Caller("+".join(names), tuple(dict.fromkeys((*shown.roles, *found.roles))))

    def require(self, caller: Caller, service: str, method: str) -> None:
        """Raises Unauthenticated, or PermissionDenied with the roles that may."""
        if not caller.roles:
            raise Unauthenticated(f"{method}: {self._way_out(caller)}")
        allowed = roles_of(service, method)
        if not allowed.issuperset(caller.roles):
            raise _denied(caller, f"{service.rpartition('.')[2]}.{method}", allowed)

    def _way_out(self, caller: Caller) -> str:
        if caller.is_revoked:
            return (
                f"the certificate of {caller.name} is revoked: ask for a new one, which `headrace certs FOLDER "
                f"--client {caller.name}` makes"
            )
        if caller.has_unknown_token:
            return (
                "the token is none of the job's tokens_file: it was revoked, or is another job's: ask for one that "
                "`headrace tokens add` made"
            )
        send = "set HEADRACE_TOKEN_FILE to a file with a token that `headrace tokens add` made"
        if not self._has_certificates:
            return f"it came without a token: {send}"
        if not caller.name:
            return f"it came without a certificate and without a token: use one of the two; {send}"
        renew = f"renew it with `headrace certs FOLDER --client {caller.name} --role ROLE`"
        return f"the certificate of {caller.name} names no role: {renew}" + (f", or {send}" if self._tokens else "")


def _denied(caller: Caller, method: str, allowed: frozenset[Role]) -> HeadraceError:
    may = ", ".join(role for role in Role if role in allowed) or "nobody"
    return PermissionDenied(
        f"{caller.name} has the role {caller.role}, which may not call {method}: {may} may: use a certificate or token "
        "of such a role (`headrace certs`, `headrace tokens`)",
        method=method,
        role=caller.role,
    )
