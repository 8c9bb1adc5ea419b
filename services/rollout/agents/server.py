"""Serves the endpoint on this machine's loopback interface, in the service's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from headrace.errors import ConfigError
from headrace.rpc.net import free_port

_HOST = "127.0.0.1"
_STOP_SECONDS = 5.0
_BACKLOG = 1024


class EndpointServer:
    """States: built → started → stopped."""

    def __init__(self, application: Any, port: int | None = None) -> None:
        self._application = application
        self.url = f"http://{_HOST}:{port or free_port(_HOST)}"
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

    def _listener(self) -> socket.socket:
        port = int(self.url.rpartition(":")[2])
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"--openai-port {port}: {error.strerror}: choose another, or leave it out for any free one",
                field="rollout.openai_port",
            ) from error
        return listener
