"""Serves the endpoint in the service's own event loop, on the loopback interface unless the job names another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import ConfigError
from headrace.limits import MAX_HTTP_HEADER_BYTES
from headrace.rpc.net import Address, free_port, listener
from headrace.rpc.tls import TlsFolder, endpoint_context, peer_of, require_named

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
    ) -> None:
        """`end_calls` tells those who still wait for a response that they may ask again.

        Raises ConfigError where `tls` has no certificate for the host.
        """
        self._end_calls = end_calls
        self._adopted: socket.socket | None = None
        self._application = application
        self._address = Address(host, port or free_port(host))
        self._tls = tls
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
            f"tokens would travel unencrypted to --openai-host {host}: {ways} --tokens-file out"
            if has_tokens
            else f"--openai-host {host} can be reached from other machines, where anybody may ask the policy, "
            f"unencrypted: {ways} it out, or pass --insecure on a private network",
            field="rollout.openai_host",
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
                f"--openai-host {self._address.host} --openai-port {self._address.port}: {error.strerror or error}: "
                "choose others, or leave --openai-port out for any free one",
                field="rollout.openai_port",
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
