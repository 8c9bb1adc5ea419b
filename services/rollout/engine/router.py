"""sglang-router in front of the engines. Generation goes through it; control calls go to the engines directly.

It is known to pick a dead worker again and to accept a bad one silently, so the fleet tells it which engines to use.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, Unavailable
from headrace.process.guarded import GuardedProcess
from headrace.rpc.net import free_port
from services.rollout.engine.answer import BadAnswer
from services.rollout.engine.http import Http

_CALL_SECONDS = 10.0
_READY_SECONDS = 180.0
_JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.1


def command(policy: str, port: int, metrics_port: int, request_seconds: float) -> list[str]:
    """Returns the router's command. Retries are done here, and the fleet is the circuit breaker."""
    return [
        *(sys.executable, "-m", "services.rollout.engine.router_process"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", policy, "--log-level", "warn"),
        *("--request-timeout-secs", str(int(request_seconds) + 1)),
        *("--disable-retries", "--disable-circuit-breaker"),
    ]


class Router:
    """States: built → started → stopped."""

    def __init__(self, policy: str, log_path: Path, *, request_seconds: float) -> None:
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._child = GuardedProcess(command(policy, port, metrics_port, request_seconds), log_path, {})
        self._http = Http(self.url)

    async def start(self) -> None:
        """Returns when it answers. Raises Unavailable with its last log lines when it does not."""
        await self._child.start()
        end = time.monotonic() + _READY_SECONDS
        while not await self._answers():
            if self._child.exit_code is not None or time.monotonic() > end:
                await self._child.stop(grace_seconds=1.0)
                raise Unavailable(f"sglang-router did not start:\n{self._child.last_lines()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def wait(self) -> int:
        """Returns the exit code once the process has ended."""
        return await self._child.wait()

    async def add(self, engine_url: str) -> None:
        """Returns when requests are routed to the engine. Raises HeadraceError when the router refuses it."""
        if await self._routes_to(engine_url):
            return
        await self._call("POST", "/workers", {"url": engine_url})
        end = time.monotonic() + _JOIN_SECONDS
        while not await self._routes_to(engine_url):
            if time.monotonic() > end:
                raise Unavailable(f"the router did not take {engine_url} within {_JOIN_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def remove(self, engine_url: str) -> None:
        """Does nothing when the engine is not in routing."""
        for worker in await self._workers():
            if worker.url == engine_url:
                await self._call("DELETE", f"/workers/{worker.worker_id}", None)

    async def stop(self) -> None:
        await self._http.close()
        await self._child.stop(grace_seconds=1.0)

    async def _answers(self) -> bool:
        try:
            (await self._http.request("GET", "/liveness", None, seconds=_CALL_SECONDS)).require_success()
        except HeadraceError:
            return False
        return True

    async def _routes_to(self, engine_url: str) -> bool:
        return any(worker.url == engine_url and worker.is_healthy for worker in await self._workers())

    async def _workers(self) -> list[_Worker]:
        workers = (await self._http.request("GET", "/workers", None, seconds=_CALL_SECONDS)).json().get("workers")
        if not isinstance(workers, list):
            raise BadAnswer("workers", f"the router's workers are of type {type(workers).__name__}")
        return [_Worker.of(worker) for worker in workers]

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        (await self._http.request(method, path, body, seconds=_CALL_SECONDS)).require_success()


@dataclass(frozen=True, slots=True)
class _Worker:
    worker_id: str
    url: str
    is_healthy: bool

    @classmethod
    def of(cls, worker: Any) -> _Worker:
        """One item of /workers. Raises BadAnswer."""
        match worker:
            case {"id": str(worker_id), "url": str(url), "is_healthy": bool(is_healthy)}:
                return cls(worker_id, url, is_healthy)
        raise BadAnswer("workers", "the router lists a worker without id, url and is_healthy")
