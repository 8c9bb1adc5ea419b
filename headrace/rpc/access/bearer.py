"""A client's side of bearer tokens: sends the one that the environment has with each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from headrace.errors import ConfigError
from headrace.rpc.access.watched_file import WatchedFile

VARIABLE = "HEADRACE_TOKEN"
"""The token itself."""
FILE_VARIABLE = "HEADRACE_TOKEN_FILE"
"""A file of one line, the token: read again when it changes."""
VARIABLES = (VARIABLE, FILE_VARIABLE)

_AUTHORIZATION = "authorization"
_MAX_TOKEN_BYTES = 4096


def token_of(environment: Mapping[str, str] = os.environ) -> Callable[[], str] | None:
    """Returns what gives this process's token at each call; None where it has none.

    Raises ConfigError for an unusable one.
    """
    if path := environment.get(FILE_VARIABLE):
        return WatchedFile(Path(path), _read).content
    if text := environment.get(VARIABLE):
        token = _checked(text, VARIABLE)
        return lambda: token
    return None


def interceptors(token: Callable[[], str]) -> Sequence[Any]:
    """Returns interceptors for a channel that is encrypted or stays on one machine."""
    return [_UnaryUnary(token), _UnaryStream(token)]


def _read(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            text = file.read(_MAX_TOKEN_BYTES)
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE} {path}: {error.strerror}: write the token to it, or unset it") from error
    return _checked(text, f"{FILE_VARIABLE} {path}")


def _checked(text: str, source: str) -> str:
    """The message does not show it."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{source} is not a token: it should be one word, as `headrace tokens add` printed it")
    return token


class _Bearer:
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(_AUTHORIZATION, f"Bearer {self._token()}")
        return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]  # it is a named tuple


class _UnaryUnary(_Bearer, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    async def intercept_unary_unary(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(self._with_token(details), request)


class _UnaryStream(_Bearer, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    async def intercept_unary_stream(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(self._with_token(details), request)
