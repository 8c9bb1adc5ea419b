"""sglang-router in front of the engines. Generation goes through it; control calls go to the engines directly.

It is known to pick a dead worker again and to accept a bad one silently, so the fleet tells it which engines to use.
Engines outlive it: a process that ends or hangs is replaced at the same address, and told of the same engines.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct

from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.job.schema.production import RolloutSection
from headrace.process.child import Child
from headrace.process.exit_status import meaning
from headrace.rpc.log import log
from headrace.rpc.net import free_port
from headrace.rpc.proxies import direct_to_all
from headrace.rpc.retry import Backoff
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import FleetTiming
from services.rollout.engine.http import Http

_CALL_SECONDS = 10.0
_READY_SECONDS = 180.0
_FIRST_ANSWER_SECONDS = 2.0
_JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.1
_REPLACEMENTS = 5
_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 4.0
# Of router_policy cache_aware. By sglang-router's own 64 requests and 1.5 times as many, one engine does a whole step.
_CACHE_THRESHOLD = 0.3
"""The share of a prompt that an engine must know to be preferred."""
_BALANCE_ABS_THRESHOLD = 8
_BALANCE_REL_THRESHOLD = 1.1
"""The engine with the fewest requests is chosen where another has so many more, and so many times as many."""


def command(
    rollout: RolloutSection, port: int, metrics_port: int, request_seconds: float, *, divides_requests: bool
) -> list[str]:
    """Returns the router's command. Retries are done here, and the fleet is the circuit breaker."""
    return [
        *(sys.executable, "-m", "services.rollout.engine.router_process"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", rollout.router_policy, "--log-level", "warn"),
        *_of_policy(rollout),
        *("--request-timeout-secs", str(int(request_seconds) + 1)),
        *("--disable-retries", "--disable-circuit-breaker"),
        *(["--pd-disaggregation"] if divides_requests else []),
    ]


def _of_policy(rollout: RolloutSection) -> list[str]:
    match rollout.router_policy:
        case "manual":  # a new key's requests go to the engine with the fewest keys in flight
            return ["--assignment-mode", "min_group"]
        case "cache_aware":
            return [
                *("--cache-threshold", str(_CACHE_THRESHOLD)),
                *("--balance-abs-threshold", str(_BALANCE_ABS_THRESHOLD)),
                *("--balance-rel-threshold", str(_BALANCE_REL_THRESHOLD)),
            ]
        case _:
            return []


class Router:
    """States: built → started → stopped. With `divides_requests` it gives each to a prefill and a decode engine."""

    def __init__(
        self,
        rollout: RolloutSection,
        log_path: Path,
        *,
        request_seconds: float,
        timing: FleetTiming,
        divides_requests: bool = False,
    ) -> None:
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.replaced = 0
        self._command = command(rollout, port, metrics_port, request_seconds, divides_requests=divides_requests)
        self._divides_requests = divides_requests
        self._log_path = log_path
        self._timing = timing
        self._http = Http(self.url)
        self._engines: set[str] = set()
        self._child: Child | None = None
        self._runs = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process that runs, or ran last."""
        assert self._child is not None, "the router was not started"
        return self._child.pid

    async def start(self) -> None:
        """Returns when it answers. Raises Unavailable with its last log lines when it does not."""
        self._child = await self._started()
        self._runs.set()

    async def supervise(self) -> None:
        """Replaces the process, again and again. Raises Unavailable when it cannot be started any more."""
        while True:
            why = await self._trouble()
            self._runs.clear()
            log.warning("router_lost", why=why)
            await self._replace()
            self._runs.set()
            self.replaced += 1
            log.info("router_replaced", engines=len(self._engines))

    async def add(self, engine_url: str) -> None:
        """Returns when requests are routed to the engine. Raises HeadraceError when the router refuses it."""
        self._engines.add(engine_url)
        last: HeadraceError | None = None
        try:
            async with asyncio.timeout(_JOIN_SECONDS):
                while True:
                    await self._runs.wait()
                    try:
                        return await self._join(engine_url)
                    except (Unavailable, DeadlineExceeded) as error:  # it may have been lost in the midst of it
                        last = error
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            why = f": {last.message}" if last else ""
            raise Unavailable(f"the router did not take {engine_url} within {_JOIN_SECONDS:g} s{why}") from error

    async def remove(self, engine_url: str) -> None:
        """Does nothing when the engine is not in routing. Raises HeadraceError when the router does not answer."""
        self._engines.discard(engine_url)
        if self._runs.is_set():  # one that is started is told of the engines that are left
            await self._leave(engine_url)

    async def stop(self) -> None:
        await self._http.close()
        if self._child:
            await self._child.stop(grace_seconds=1.0)

    async def _started(self) -> Child:
        child = Child(self._command, self._log_path, direct_to_all())
        await child.start()
        end = time.monotonic() + _READY_SECONDS
        async with AsyncExitStack() as on_failure:  # of a start that is cancelled as well: no process stays behind
            on_failure.push_async_callback(child.stop, grace_seconds=1.0)
            while not await self._answers(_FIRST_ANSWER_SECONDS) or child.exit_code is not None:
                if child.exit_code is not None or time.monotonic() > end:  # another may have its port, and answer
                    raise Unavailable(f"sglang-router did not start:\n{child.last_lines()}")
                await asyncio.sleep(_POLL_SECONDS)
            on_failure.pop_all()
        return child

    async def _trouble(self) -> str:
        """Returns once the process has to be replaced, and says why."""
        child = self._child
        assert child is not None
        ended = asyncio.ensure_future(child.wait())
        missed = 0
        try:
            while missed < self._timing.missed_checks:
                await asyncio.wait([ended], timeout=self._timing.check_interval_seconds)
                if ended.done():
                    how = meaning(ended.result(), child.resident_bytes)
                    return f"ended with {how}; the end of its log:\n{child.last_lines()}"
                missed = 0 if await self._answers(self._timing.check_timeout_seconds) else missed + 1
        finally:
            ended.cancel()
        await child.stop(grace_seconds=0.0)
        return f"missed {missed} checks in a row"

    async def _replace(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
        for attempt in itertools.count(1):
            try:
                self._child = await self._started()
                await self._tell()
            except HeadraceError as error:
                log.error("router_not_replaced", attempt=attempt, of=_REPLACEMENTS, error=error.message)
                if self._child:
                    await self._child.stop(grace_seconds=0.0)
                if attempt == _REPLACEMENTS:
                    raise
            else:
                return
            await backoff.sleep()

    async def _tell(self) -> None:
        """Tells a new process of all engines; the fleet may take some out meanwhile."""
        try:
            async with asyncio.timeout(_JOIN_SECONDS):
                await asyncio.gather(*(self._join(engine_url) for engine_url in sorted(self._engines)))
        except TimeoutError as error:
            raise Unavailable(f"the router did not take its engines within {_JOIN_SECONDS:g} s") from error
        for worker in await self._workers():
            if worker.url not in self._engines:
                await self._leave(worker.url)

    async def _join(self, engine_url: str) -> None:
        """Returns when requests are routed to the engine, or when it was taken out meanwhile."""
        if await self._routes_to(engine_url):
            return
        part = await _part_of_requests(engine_url) if self._divides_requests else {}
        await self._call("POST", "/workers", {"url": engine_url, **part})
        while engine_url in self._engines and not await self._routes_to(engine_url):
            await asyncio.sleep(_POLL_SECONDS)

    async def _leave(self, engine_url: str) -> None:
        for worker in await self._workers():
            if worker.url == engine_url:
                await self._call("DELETE", f"/workers/{worker.id}", None)

    async def _answers(self, seconds: float) -> bool:
        try:
            (await self._http.request("GET", "/liveness", None, seconds=seconds)).require_success()
        except HeadraceError:
            return False
        return True

    async def _routes_to(self, engine_url: str) -> bool:
        return any(worker.url == engine_url and worker.is_healthy for worker in await self._workers())

    async def _workers(self) -> list[_Worker]:
        return (await self._http.request("GET", "/workers", None, seconds=_CALL_SECONDS)).decode(_Workers).workers

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        (await self._http.request(method, path, body, seconds=_CALL_SECONDS)).require_success()


async def _part_of_requests(engine_url: str) -> dict[str, Any]:
    """Asks the engine what the router must know of it."""
    async with EngineClient(engine_url) as engine:
        info = await engine.server_info(seconds=_CALL_SECONDS)
    port = {"bootstrap_port": info.disaggregation_bootstrap_port} if info.disaggregation_mode == "prefill" else {}
    return {"worker_type": info.disaggregation_mode, **port}


class _Worker(Struct, frozen=True):
    id: str
    url: str
    is_healthy: bool


class _Workers(Struct, frozen=True):
    workers: list[_Worker]
