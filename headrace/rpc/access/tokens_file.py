"""A job's tokens, as a file: names, roles and SHA-256 digests. The tokens themselves are written nowhere.

A token is 32 random bytes, so its plain digest tells nothing about it: there is nothing to guess, and no salt to need.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.disk import atomic_write, file_lock
from headrace.errors import ConfigError
from headrace.rpc.access.roles import Role

_PREFIX = "headrace_"
"""Scanners for leaked secrets find a token by it."""
_MAX_FILE_BYTES = 1 << 20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"


class Entry(BaseModel):
    """One token, without the token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    added: str


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Mapping[Annotated[str, Field(pattern=f"^{_NAME}$")], Entry]


def digest_of(token: str) -> str:
    """The file has this in place of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def entries_in(path: Path) -> Mapping[str, Entry]:
    """Returns the entries by name. Raises ConfigError for an absent or malformed file; no message shows its content."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"tokens_file {path} is larger than {_MAX_FILE_BYTES} bytes: revoke tokens of it")
        return _File.model_validate_json(path.read_bytes()).tokens
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


def add(path: Path, name: str, role: Role) -> str:
    """Returns the new token, which is not kept. Raises ConfigError for a name that is taken or cannot be one."""
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"a token cannot be named {name[:80]!r}: use up to 64 letters, digits, '.', '_', '-' and '@'")
    token = _PREFIX + secrets.token_urlsafe(32)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    with file_lock(path):
        entries = dict(entries_in(path)) if path.exists() else {}
        if name in entries:
            raise ConfigError(
                f"{path} has a token {name}: revoke it first, or add the next one under another name and revoke {name} "
                "when its users have the next"
            )
        _write(path, {**entries, name: Entry(role=role, sha256=digest_of(token), added=now)})
    return token


def revoke(path: Path, name: str) -> None:
    """Raises ConfigError for a name that is not there."""
    with file_lock(path):
        entries = dict(entries_in(path))
        if entries.pop(name, None) is None:
            raise ConfigError(f"{path} has no token {name[:80]}: its tokens are {', '.join(entries) or 'none'}")
        _write(path, entries)


def _write(path: Path, entries: Mapping[str, Entry]) -> None:
    """A reader finds the old file or the new one, which is its user's alone from the start."""
    text = json.dumps(_File(tokens=entries).model_dump(mode="json"), indent=2) + "\n"
    with atomic_write(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
