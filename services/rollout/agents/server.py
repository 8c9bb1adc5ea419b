"""Serves the endpoint in the service's own event loop, on the loopback interface unless the job names another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import ConfigError
from headrace.rpc.net import Address, free_port, listener

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
        end_calls: Callable[[], None] = lambda: None,
    ) -> None:
        """`end_calls` tells those who still wait for a response that they may ask again."""
        self._end_calls = end_calls
        self._adopted: socket.socket | None = None
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

        listening = self._listener()
        config = uvicorn.Config(
            self._application,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_DRAIN_SECONDS + _LAST_WORDS_SECONDS,
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop(self) -> None:
        """Answers nobody who comes from now on; who waits for a response gets it, or is told to ask again."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=_DRAIN_SECONDS)
        self._end_calls()
        await asyncio.wait({self._serving}, timeout=2 * _LAST_WORDS_SECONDS)

    def require_private(self) -> None:
        """Raises ConfigError where other machines can reach it."""
        if not self._address.is_loopback:
            raise ConfigError(
                f"--openai-host {self._address.host} can be reached from other machines, where anybody may ask the "
                "policy, unencrypted: leave it out, or pass --insecure on a private network",
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
