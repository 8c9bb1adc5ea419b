"""A server's side of bearer tokens: finds whose token came."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import ConfigError
from headrace.rpc.access.caller import Caller
from headrace.rpc.access.tokens_file import Entry, digest_of, entries_in
from headrace.rpc.access.watched_file import WatchedFile
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
