"""Calling a server: channels, tokens, deadlines, the server's error class on this side, and watches that continue."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc

from headrace.disk import WatchedFile
from headrace.errors import ConfigError, DeadlineExceeded, HeadraceError, Unavailable
from headrace.limits import MAX_MESSAGE_BYTES
from headrace.rpc import tracing
from headrace.rpc.net import CONNECT_SECONDS, Address, keepalive_options, resolved
from headrace.rpc.retry import Backoff, retry_until
from headrace.rpc.status import details_of, from_rpc_error
from headrace.rpc.tls import SERVICE_NAME, channel_credentials, tls_of

DEFAULT_DEADLINE_SECONDS = 300.0
"""As long as services wait for one another while one of them is restarted."""


Reply = TypeVar("Reply")


async def call(
    method: Callable[..., Awaitable[Reply]], request: Any, *, deadline_seconds: float, peer: str = "the server"
) -> Reply:
    """One unary call. Made again until the deadline while the server is away or its disk full; raises its error.

    `peer`: who is asked, for the message where nobody answers: "the buffer at host:port".
    """

    async def attempt(left: float) -> Reply:
        return await call_once(method, request, deadline_seconds=left, peer=peer)

    return await retry_until(time.monotonic() + deadline_seconds, attempt)


async def call_once(
    method: Callable[..., Awaitable[Reply]],
    request: Any,
    *,
    deadline_seconds: float,
    peer: str = "the server",
    waits: bool = True,
) -> Reply:
    """One unary call. It `waits` for a server that cannot be reached, and raises what the server answers."""
    try:
        return await method(request, timeout=deadline_seconds, wait_for_ready=waits)
    except grpc.aio.AioRpcError as error:
        raise _mapped(error, deadline_seconds, peer) from error


async def stream(
    method: Callable[..., Any], request: Any, *, deadline_seconds: float | None, peer: str = "the server"
) -> AsyncIterator[Any]:
    """A server stream; errors are mapped, nothing is retried. Only an endless watch goes without a deadline."""
    replies = method(request, timeout=deadline_seconds, wait_for_ready=True)
    try:
        async for reply in replies:
            yield reply
    except grpc.aio.AioRpcError as error:
        raise _mapped(error, deadline_seconds, peer) from error
    finally:
        replies.cancel()  # a reader that leaves ends the call, which would wait at the server


def _mapped(error: grpc.aio.AioRpcError, deadline_seconds: float | None, peer: str) -> HeadraceError:
    mapped = from_rpc_error(error)
    if isinstance(mapped, DeadlineExceeded) and deadline_seconds is not None:
        return DeadlineExceeded(f"{peer} gave no answer within {round(deadline_seconds, 2):g} s: {mapped.message}")
    if isinstance(mapped, Unavailable) and details_of(error) is None:
        return Unavailable(f"{peer} cannot be reached: {mapped.message}", retry_after_seconds=0.0)
    if error.code() is grpc.StatusCode.CANCELLED:  # not by us, which is no error of gRPC's: the server is ending
        return Unavailable(f"{peer} ended before it had answered: try again when it is back", retry_after_seconds=0.0)
    return mapped


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


def interceptors(entries: Callable[[], Iterable[tuple[str, str]]]) -> Sequence[Any]:
    """Returns interceptors that add these entries to the metadata of each call."""
    return [_UnaryUnary(entries), _UnaryStream(entries)]


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


class _WithMetadata:
    def __init__(self, entries: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._entries = entries

    def _with_entries(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._entries())
        return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]  # it is a named tuple


class _UnaryUnary(_WithMetadata, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    async def intercept_unary_unary(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(self._with_entries(details), request)


class _UnaryStream(_WithMetadata, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    async def intercept_unary_stream(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(self._with_entries(details), request)


def connect(address: str) -> grpc.aio.Channel:
    """A lazy channel to `host:port`, or to whichever of `host:port|host:port` answers.

    Encrypted where HEADRACE_TLS_DIR names a folder; raises ConfigError for one without certificates. Calls have the
    token of HEADRACE_TOKEN or HEADRACE_TOKEN_FILE, but never unencrypted to another machine. Retries are
    `headrace.rpc.client`'s: gRPC's own end after five tries.
    """
    target = _target(address)
    options: list[tuple[str, str | int]] = [
        ("grpc.enable_http_proxy", 0),  # a proxy of the environment is for other addresses than a run's
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_frame_size", 1 << 20),
        # A client is back 0.1 s to 0.3 s after its server instead of 5 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_SECONDS * 1000)),  # in truth the time that a connection has
        *keepalive_options(),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    folder, token = tls_of(), token_of()
    shows_token = folder is not None or all(Address.parse(place).is_loopback for place in address.split("|"))
    added = interceptors(lambda: [(_AUTHORIZATION, f"Bearer {token()}")]) if token and shows_token else []
    if tracing.is_on():
        added = [*added, *interceptors(tracing.metadata)]
    if folder is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=added or None)
    options += [("grpc.ssl_target_name_override", SERVICE_NAME), ("grpc.default_authority", SERVICE_NAME)]
    return grpc.aio.secure_channel(target, channel_credentials(folder), options=options, interceptors=added or None)


def _target(address: str) -> str:
    """Resolves several addresses, because gRPC needs numeric ones.

    gRPC tries them in order and stays with the first that answers. All are of one family, the first place's.
    """
    places = [Address.parse(place) for place in address.split("|")]
    if len(places) == 1:
        return address
    family, found = 0, []
    for place in places:
        known = [row for row in resolved(place) if family in (0, row[0])]
        family = family or known[0][0]
        found += [str(Address(row[4][0], place.port)) for row in known[:1]]
    return ("ipv6:" if family == socket.AF_INET6 else "ipv4:") + ",".join(found)


T = TypeVar("T", covariant=True)


class StreamCall(Protocol[T]):
    """One call of a stream, from where its reader has come to."""

    def __call__(self, *, deadline_seconds: float | None) -> AsyncIterator[T]:
        """Raises Unavailable where the server ends."""


async def resumed(
    channel: grpc.aio.Channel,
    ask: StreamCall[T],
    *,
    deadline_seconds: float | None = None,
    away_seconds: float = DEFAULT_DEADLINE_SECONDS,
) -> AsyncGenerator[T]:
    """The messages of `ask`, which is called again after each Unavailable.

    Raises that error once the server has been away for `away_seconds`, and every other one at once.
    """
    loop = asyncio.get_running_loop()
    end = None if deadline_seconds is None else loop.time() + deadline_seconds
    away_since: float | None = None
    backoff = Backoff()
    while True:
        try:
            async for message in ask(deadline_seconds=None if end is None else max(end - loop.time(), 0.0)):
                away_since = None
                backoff.reset()
                yield message
            return
        except Unavailable as error:
            away_since = away_since or loop.time()
            until = away_since + away_seconds if end is None else min(away_since + away_seconds, end)
            await backoff.sleep(error, at_most=until - loop.time())
            try:
                async with asyncio.timeout_at(until):
                    await channel.channel_ready()
            except TimeoutError:
                raise error from None


M = TypeVar("M")


async def merged_streams(streams: Sequence[AsyncGenerator[M]], most_waiting: int) -> AsyncGenerator[M]:
    """Every message of every stream, once; raises the first error of one. Close it: the streams' work ends with it.

    At most `most_waiting` messages are read ahead of a slow reader.
    """
    found = asyncio.Queue[tuple[M] | Exception | None](most_waiting)

    async def read(stream: AsyncGenerator[M]) -> None:
        try:
            async with aclosing(stream):
                async for message in stream:
                    await found.put((message,))
        except Exception as error:  # noqa: BLE001  # it is raised to the reader
            await found.put(error)
        else:
            await found.put(None)

    reading = [asyncio.create_task(read(stream)) for stream in streams]
    num_left = len(reading)
    try:
        while num_left:
            match await found.get():
                case None:
                    num_left -= 1
                case Exception() as error:
                    raise error
                case (message,):
                    yield message
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class Closing(ABC):
    """`async with` closes it, whether or not its block raises."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Ends its connections."""
