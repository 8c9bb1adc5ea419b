"""sglang-router in front of the engines. Generation goes through it; control calls go to the engines directly.

It is known to pick a dead worker again and to accept a bad one silently, so the fleet tells it who is in.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from headrace.errors import Unavailable
from headrace.rpc.net import free_port
from services.rollout.child import ChildProcess

_CALL_SECONDS = 10.0
_READY_SECONDS = 180.0
_JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.1


class Router:
    """States: built → started → stopped."""

    def __init__(self, policy: str, log_path: Path, *, request_seconds: float) -> None:
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._child = ChildProcess(
            [
                *(sys.executable, "-m", "sglang_router.launch_router"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
                *("--policy", policy, "--log-level", "warn"),
                *("--request-timeout-secs", str(int(request_seconds) + 1)),
                *("--disable-retries", "--disable-circuit-breaker"),  # ours are the retries; the fleet is the breaker
            ],
            log_path,
            {},
        )
        self._http = httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False, timeout=_CALL_SECONDS)

    async def start(self) -> None:
        """Returns when it answers. Raises Unavailable with its last log lines when it does not."""
        await self._child.start()
        end = time.monotonic() + _READY_SECONDS
        while not await self._answers():
            if self._child.exit_code is not None or time.monotonic() > end:
                await self._child.stop()
                raise Unavailable(f"sglang-router did not start:\n{self._child.last_lines()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._child.wait()

    async def add(self, engine_url: str) -> None:
        """Returns when requests are routed to it. Raises Unavailable when the router does not take it."""
        if await self._routes_to(engine_url):
            return
        await self._call("POST", "/workers", {"url": engine_url})
        end = time.monotonic() + _JOIN_SECONDS
        while not await self._routes_to(engine_url):
            if time.monotonic() > end:
                raise Unavailable(f"the router did not take {engine_url} within {_JOIN_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def remove(self, engine_url: str) -> None:
        """Takes it out of routing; nothing happens when it is not in."""
        for worker in await self._workers():
            if worker["url"] == engine_url:
                await self._call("DELETE", f"/workers/{worker['id']}", None)

    async def stop(self) -> None:
        """Ends it."""
        await self._http.aclose()
        await self._child.stop(grace_seconds=1.0)

    async def _answers(self) -> bool:
        try:
            return (await self._http.get("/liveness")).is_success
        except httpx.TransportError:
            return False

    async def _routes_to(self, engine_url: str) -> bool:
        return any(worker["url"] == engine_url and worker["is_healthy"] for worker in await self._workers())

    async def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (await self._call("GET", "/workers", None))["workers"]
        return workers

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise Unavailable(f"the router at {self.url} does not answer: {type(error).__name__} {error}") from error
        if response.is_error:
            raise Unavailable(f"the router answered {response.status_code} to {method} {path}: {response.text[:300]}")
        return response.json()
