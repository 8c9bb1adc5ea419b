"""Serves an ASGI application in a service's own event loop, on the loopback interface unless the job names another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, DeadlineExceeded, InvalidArgument, PermissionDenied, Unauthenticated
from headrace.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_BODY_SECONDS, MAX_HTTP_HEADER_BYTES
from headrace.rpc.access import AUTHORIZATION, Access
from headrace.rpc.log import log
from headrace.rpc.net import Address, free_port, listener
from headrace.rpc.tls import TlsFolder, endpoint_context, peer_of, require_named

if TYPE_CHECKING:
    from starlette.requests import Request

PEER = "peer"
"""The key of what the connection's certificate says, in the state of a request."""
_DRAIN_SECONDS = 8
_LAST_WORDS_SECONDS = 2


class EndpointServer:
    """States: built → started → stopped."""

    def __init__(
        self,
        application: Any,
        port: int | None = None,
        *,
        host: str = "127.0.0.1",
        tls: TlsFolder | None = None,
        end_calls: Callable[[], None] = lambda: None,
        section: str = "rollout",
        flag: str = "openai",
    ) -> None:
        """`end_calls` tells those who still wait for a response that they may ask again.

        `section` and `flag`: the job's SECTION.FLAG_host and FLAG_port are the address.

        Raises ConfigError where `tls` has no certificate for the host.
        """
        self._end_calls = end_calls
        self._adopted: socket.socket | None = None
        self._application = application
        self._address = Address(host, port or free_port(host))
        self._tls = tls
        self._section, self._flag = section, flag
        self.url = f"https://{self._address.from_here}" if tls else f"http://{self._address}"
        if tls:
            require_named(tls, self._address.from_here.host)
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None

    async def start(self) -> None:
        """Returns when it listens. Raises ConfigError when somebody has the port."""
        listening = self._listener()
        self._server = _uvicorn_server(self._application, endpoint_context(self._tls) if self._tls else None)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def stop(self) -> None:
        """Answers nobody who comes from now on; who waits for a response gets it, or is told to ask again."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=_DRAIN_SECONDS)
        self._end_calls()
        await asyncio.wait({self._serving}, timeout=2 * _LAST_WORDS_SECONDS)

    def require_private(self, *, insecure: bool = False, has_tokens: bool = False) -> None:
        """Raises ConfigError where other machines can reach it, unencrypted.

        `insecure`: they may, but not where that brings tokens over the wire.
        """
        if self._tls or self._address.is_loopback or (insecure and not has_tokens):
            return
        host, ways = self._address.host, "pass --tls-dir FOLDER (`headrace certs FOLDER` makes it), or leave"
        raise ConfigError(
            f"tokens would travel unencrypted to --{self._flag}-host {host}: {ways} --tokens-file out"
            if has_tokens
            else f"--{self._flag}-host {host} can be reached from other machines, where anybody may ask the policy, "
            f"unencrypted: {ways} it out, or pass --insecure on a private network",
            field=f"{self._section}.{self._flag}_host",
        )

    def adopt(self, descriptor: int) -> None:
        """Listens on this socket, which the launcher keeps open: who comes while the service starts again, waits."""
        self._adopted = socket.socket(fileno=descriptor)
        self._adopted.set_inheritable(False)

    def _listener(self) -> socket.socket:
        if self._adopted is not None:
            return self._adopted
        try:
            return listener(self._address)
        except OSError as error:
            raise ConfigError(
                f"--{self._flag}-host {self._address.host} --{self._flag}-port {self._address.port}: "
                f"{error.strerror or error}: choose others, or leave --{self._flag}-port out for any free one",
                field=f"{self._section}.{self._flag}_port",
            ) from error


def _uvicorn_server(application: Any, context: ssl.SSLContext | None) -> Any:
    import uvicorn  # with the rest of its kind a quarter of a second: only where there is an endpoint
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Tells the application which certificate the client has shown: uvicorn does not."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            self.app_state = {**self.app_state, PEER: peer_of(transport.get_extra_info("ssl_object"))}
            super().connection_made(transport)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are the service's

    config = uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HTTP_HEADER_BYTES,
        timeout_graceful_shutdown=_DRAIN_SECONDS + _LAST_WORDS_SECONDS,
        ssl_context_factory=(lambda *_: context) if context else None,
    )
    return Server(config)


_OPEN = Access(has_certificates=False, tokens=None)


class Gate:
    """Refuses a request before its body is read: the roles of gRPC's callers may ask.

    A caller shows a certificate, or sends a token as OpenAI's clients send their key, `Authorization: Bearer TOKEN`, or
    as Anthropic's do, `x-api-key: TOKEN`.
    """

    def __init__(self, service: str, access: Access = _OPEN) -> None:
        """`service`: the full name of the gRPC service whose methods the requests stand for."""
        self._service = service
        self._access = access

    async def body(self, request: Request, rpc: str, *, has_key: bool, codings: Collection[str] = ()) -> bytes:
        """The request's body, once its caller is allowed. `has_key`: the address itself is the key.

        `codings`: those of the body that the caller undoes.

        Raises Unauthenticated, PermissionDenied, InvalidArgument or DeadlineExceeded.
        """
        if not (has_key or self._access.is_open):
            self._require_allowed(request, rpc)
        return await read_body(request, codings)

    def _require_allowed(self, request: Request, rpc: str) -> None:
        shown = request.scope.get("state", {}).get(PEER, {})
        tokens = [(AUTHORIZATION, value) for value in request.headers.getlist(AUTHORIZATION)]
        tokens += [(AUTHORIZATION, f"Bearer {value}") for value in request.headers.getlist("x-api-key")]
        caller = self._access.caller(shown, tokens)
        try:
            self._access.require(caller, self._service, rpc)
        except (Unauthenticated, PermissionDenied) as error:
            log.info("http_refused", caller=caller.name, role=caller.role, path=request.url.path, reason=error.reason)
            if isinstance(error, Unauthenticated):
                raise Unauthenticated(f"{error.message}; clients send it as api_key") from error
            raise


async def read_body(request: Request, codings: Collection[str] = ()) -> bytes:
    """Raises InvalidArgument, and DeadlineExceeded for one that does not end."""
    if (coding := request.headers.get("content-encoding")) and coding not in codings:
        raise InvalidArgument(f"Content-Encoding {coding[:40]}: send the JSON as it is", reason="CONTENT_ENCODING")
    if (length := request.headers.get("content-length", "")).isdigit():
        _require_size(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_HTTP_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                _require_size(len(body))
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the body did not end within {MAX_HTTP_BODY_SECONDS:g} s: it had {len(body):,} bytes by then",
            reason="REQUEST_TOO_SLOW",
        ) from error
    return bytes(body)


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_HTTP_BODY_BYTES:
        raise InvalidArgument(
            f"the request has {num_bytes:,} bytes or more, may have {MAX_HTTP_BODY_BYTES:,}", reason="BODY_TOO_LARGE"
        )
