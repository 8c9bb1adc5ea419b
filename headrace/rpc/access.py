"""Decides a call before its request is read: who calls, and whether that caller's roles may call this.

Certificate with a role    its role; with a token beside it both roles must allow the call
Certificate without one    the token's role; without a token nothing is allowed
The services' certificate  the role `service`; a token beside it is not looked at
No certificates (loopback) the token's role

A role is a URI among a certificate's alternative names, `urn:headrace:role:viewer`; gRPC gives those as they were
signed, so nothing is parsed. The services' certificate has none, and the name `headrace`. A job's tokens are a file of
names, roles and digests.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.disk import WatchedFile, atomic_write, file_lock
from headrace.errors import ConfigError, HeadraceError, PermissionDenied, Unauthenticated
from headrace.rpc.log import log
from headrace.rpc.tls import SERVICE_NAME, Peer

# The roles of callers, and the RPCs that each may call: docs/security.md shows them, a test calls each cell.


class Role(StrEnum):
    """A caller has one, or two of which each must allow a call.

    `SERVICE` is a run's own services, which the services' certificate shows.
    """

    VIEWER = "viewer"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    TRAINER = "trainer"
    ADMIN = "admin"
    SERVICE = "service"


OF_CLIENTS = tuple(role for role in Role if role is not Role.SERVICE)
"""The roles that a client's certificate may have."""


def role_named(text: str) -> Role:
    """Raises ConfigError for one that there is not."""
    try:
        return Role(text)
    except ValueError:
        raise ConfigError(f"role {text[:80]!r} is none: use one of {', '.join(Role)}") from None


_PRODUCER, _CONSUMER, _TRAINER, _SERVICE = Role.PRODUCER, Role.CONSUMER, Role.TRAINER, Role.SERVICE

_LOOKS = frozenset(Role)
"""State and progress, without what samples contain."""
_READS_SAMPLES = frozenset({_CONSUMER, _TRAINER, _SERVICE, Role.ADMIN})
_ASKS = frozenset({_CONSUMER, _PRODUCER, _TRAINER, _SERVICE, Role.ADMIN})
"""Costs an engine's or a worker's time, and changes nothing."""
_PRODUCES = frozenset({_PRODUCER, _SERVICE, Role.ADMIN})
_TRAINS = frozenset({_TRAINER, _SERVICE, Role.ADMIN})
_OPERATES = frozenset({Role.ADMIN})

ALLOWED: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "headrace.api.buffer.v1.BufferService": {
        "CreateStream": _TRAINS,
        "DeleteStream": _OPERATES,
        "ListStreams": _LOOKS,
        "SubmitPrompts": _PRODUCES,
        "LeaseGroups": _PRODUCES,
        "RenewLeases": _PRODUCES,
        "ReleaseLeases": _PRODUCES,
        "RetryGroups": _OPERATES,
        "DropGroups": _OPERATES,
        "PutGroups": _PRODUCES,
        "LeaseBatch": _TRAINS,
        "FetchSamples": _READS_SAMPLES,
        "ConsumeBatch": _TRAINS,
        "CommitStep": _TRAINS,
        "Rewind": _TRAINS,
        "SetPolicyVersion": _TRAINS,
        "Watch": _LOOKS,
        "ListGroups": _LOOKS,
        "GetStats": _LOOKS,
        "UploadColumn": _PRODUCES,
        "FetchColumn": _READS_SAMPLES,
        "Backup": _OPERATES,
    },
    "headrace.api.rollout.v1.RolloutService": {
        "Generate": _ASKS,
        "Evaluate": _TRAINS,
        "GetFleet": _LOOKS,
        "ScaleFleet": _OPERATES,
        "BeginPublish": _TRAINS,
        "PublishBucket": _TRAINS,
        "CommitPublish": _TRAINS,
        "AbortPublish": _TRAINS,
        "PauseProduction": _TRAINS,
        "ResumeProduction": _TRAINS,
        "ReleaseMemory": _TRAINS,
        "ResumeMemory": _TRAINS,
        "SetReward": _OPERATES,
        "LeaseTasks": _PRODUCES,
        "RenewTasks": _PRODUCES,
        "FinishTask": _PRODUCES,
        "JoinRun": _TRAINS,
        "LeaveRun": _TRAINS,
    },
    "headrace.api.reward.v1.RewardService": {
        "Score": _ASKS,
        "ListScorers": _LOOKS,
        "ChangeScorer": _OPERATES,
        "GetScorerState": _LOOKS,
    },
    "headrace.api.trainer.v1.TrainerService": {
        "GetStatus": _LOOKS,
        "WatchProgress": _LOOKS,
        "Pause": _OPERATES,
        "Resume": _OPERATES,
        "SaveCheckpoint": _OPERATES,
        "ExportModel": _OPERATES,
        "Stop": _OPERATES,
    },
}
"""The allowed roles by service and method. No role may call a method that is not listed."""


def roles_of(service: str, method: str) -> frozenset[Role]:
    return ALLOWED.get(service, {}).get(method, frozenset())


AUTHORIZATION = "authorization"
SCHEME = "Bearer "

Metadata = Iterable[tuple[str, str | bytes]]

_URN = "urn:headrace:role:"
_OF_URN = {f"{_URN}{role}".encode(): role for role in OF_CLIENTS}


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is for the log. Each of `roles` must allow a call; a caller without one may call nothing."""

    name: str
    roles: tuple[Role, ...]
    has_unknown_token: bool = False

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


_PREFIX = "headrace_"
"""Scanners for leaked secrets find a token by it."""
_MAX_TOKENS_FILE_BYTES = 1 << 20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"


class TokenEntry(BaseModel):
    """A token's role and SHA-256. The token itself is not stored.

    It is 32 random bytes, so its plain digest tells nothing about it: there is nothing to guess, and no salt to need.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    added: str


class _TokensFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Mapping[Annotated[str, Field(pattern=f"^{_NAME}$")], TokenEntry]


def digest_of(token: str) -> str:
    """The file has this in place of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def tokens_in(path: Path) -> Mapping[str, TokenEntry]:
    """Returns the entries by name. Raises ConfigError for an absent or malformed file; no message shows its content."""
    try:
        if path.stat().st_size > _MAX_TOKENS_FILE_BYTES:
            raise ConfigError(f"tokens_file {path} is larger than {_MAX_TOKENS_FILE_BYTES} bytes: revoke tokens of it")
        return _TokensFile.model_validate_json(path.read_bytes()).tokens
    except OSError as error:
        raise ConfigError(
            f"tokens_file {path}: {error.strerror}: `headrace tokens add {path} NAME --role ROLE` makes it",
            field="tokens_file",
        ) from error
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])[:160]
        raise ConfigError(
            f"tokens_file {path} is not one that `headrace tokens` wrote: {where or 'it'} is wrong: mend it, or revoke "
            "and add its tokens again in a new file",
            field="tokens_file",
        ) from None


def add_token(path: Path, name: str, role: Role) -> str:
    """Returns the new token, which is not kept. Raises ConfigError for a name that is taken or cannot be one."""
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"a token cannot be named {name[:80]!r}: use up to 64 letters, digits, '.', '_', '-' and '@'")
    token = _PREFIX + secrets.token_urlsafe(32)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    with file_lock(path):
        entries = dict(tokens_in(path)) if path.exists() else {}
        if name in entries:
            raise ConfigError(
                f"{path} has a token {name}: revoke it first, or add the next one under another name and revoke {name} "
                "when its users have the next"
            )
        _write_tokens(path, {**entries, name: TokenEntry(role=role, sha256=digest_of(token), added=now)})
    return token


def revoke_token(path: Path, name: str) -> None:
    """Raises ConfigError for a name that is not there."""
    with file_lock(path):
        entries = dict(tokens_in(path))
        if entries.pop(name, None) is None:
            raise ConfigError(f"{path} has no token {name[:80]}: its tokens are {', '.join(entries) or 'none'}")
        _write_tokens(path, entries)


def _write_tokens(path: Path, entries: Mapping[str, TokenEntry]) -> None:
    """A reader finds the old file or the new one, which is its user's alone from the start."""
    text = json.dumps(_TokensFile(tokens=entries).model_dump(mode="json"), indent=2) + "\n"
    with atomic_write(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)


class Tokens:
    """The tokens of the job's file as it is now: a new or a revoked one needs no restart."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is not there, or is not of tokens."""
        self._file = WatchedFile(path, tokens_in)
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
        digest = digest_of(token)
        named = (name for name, entry in entries.items() if hmac.compare_digest(entry.sha256, digest))
        name = next(named, None)
        return None if name is None else Caller(name, (entries[name].role,))


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

    def __init__(self, *, has_certificates: bool, tokens: Tokens | None) -> None:
        self._has_certificates = has_certificates
        self._tokens = tokens

    @property
    def is_open(self) -> bool:
        """True where every client that connects may call everything."""
        return not self._has_certificates and self._tokens is None

    def caller(self, peer: Peer, metadata: Metadata) -> Caller:
        """Returns the caller, without roles where it has shown none; never raises, so that a refusal can name it."""
        shown = of_certificate(peer) if self._has_certificates else _NOBODY
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
