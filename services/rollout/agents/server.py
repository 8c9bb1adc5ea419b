"""Serves the endpoint in the service's own event loop, on the loopback interface unless the job names another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from headrace.errors import ConfigError
from headrace.rpc.net import Address, free_port

_STOP_SECONDS = 5.0
_BACKLOG = 1024


class EndpointServer:
    """States: built → started → stopped."""

    def __init__(self, application: Any, port: int | None = None, *, host: str = "127.0.0.1") -> None:
        self._application = application
        self._address = Address(host, port or free_port(host))
        self.url = f"http://{self._address}"
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None

    async def start(self) -> None:
        """Returns when it listens. Raises ConfigError when somebody has the port."""
        import uvicorn  # with the rest of its kind a quarter of a second: only where there is an endpoint

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they are the service's

        listener = self._listener()
        config = uvicorn.Config(
            self._application,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(_STOP_SECONDS),
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Ends what is still answered after some seconds."""
        if self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _STOP_SECONDS):
                await self._serving

    def require_private(self) -> None:
        """Raises ConfigError where other machines can reach it."""
        if not self._address.is_loopback:
            raise ConfigError(
                f"--openai-host {self._address.host} can be reached from other machines, where anybody may ask the "
                "policy, unencrypted: leave it out, or pass --insecure on a private network",
                field="rollout.openai_host",
            )

    def _listener(self) -> socket.socket:
        host, port = self._address.host, self._address.port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"--openai-host {host} --openai-port {port}: {error.strerror or error}: choose others, or leave "
                "--openai-port out for any free one",
                field="rollout.openai_port",
            ) from error
        return listener
