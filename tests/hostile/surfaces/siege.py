"""Ports under attack while well-behaved clients go on, and all that holds afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor

from tests.hostile.servers.servers import ServerProcess, tracebacks
from tests.hostile.surfaces.attacks import Maker, of_grpc, of_http
from tests.hostile.surfaces.polite import Polite
from tests.hostile.surfaces.stranger import Stranger
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER
from tests.support.processes.health_probe import HealthProbe

MOST_HEALTH_SECONDS = 1.0
MOST_SECONDS_BY_CLOCK = 15.0
MEMORY_FACTOR = 1.1
MEMORY_SLACK_BYTES = 32 << 20
"""An allocator's own, of the calls of a flood that waited at the same time; a process may be small beside it."""
_BUG_STATUSES = ("500", "501", "502", "505")


@dataclass(frozen=True)
class Port:
    """One surface. `path` is what attacks name there; `asks` what a well-behaved client of HTTP gets."""

    server: ServerProcess
    address: str
    path: str
    makes: Maker
    asks: str | None = None


QUICK = {BUFFER: "GetStats", ROLLOUT: "GetFleet", REWARD: "ListScorers", TRAINER: "GetStatus"}
"""An RPC of each service that answers at once."""


def ports_of(server: ServerProcess, service: ServiceDescriptor, *, openai: str | None = None) -> list[Port]:
    """A service's: gRPC, metrics, and the OpenAI endpoint where `openai` is its address."""
    ports = [
        Port(server, server.address, f"/{service.full_name}/{QUICK[service]}", of_grpc),
        Port(server, server.metrics_address, "/metrics", of_http, "/metrics"),
    ]
    return [*ports, *([Port(server, openai, "/v1/chat/completions", of_http, "/v1/models")] if openai else [])]


async def besiege(ports: Sequence[Port], count: int, seed: str) -> None:
    """So many attacks on all ports together; the first quarter of them loads and allocates what is needed once."""
    strangers = [Stranger(port.address, port.path, port.makes, seed) for port in ports]
    share, started = count // len(ports), time.monotonic()
    await _attack(strangers, share // 4)
    servers = list(dict.fromkeys(port.server for port in ports))
    before = {server: server.rss_bytes for server in servers}
    with contextlib.ExitStack() as watching:
        healths = {
            server: watching.enter_context(HealthProbe(server.address, lambda server=server: server.pid))
            for server in servers
        }
        polites = [watching.enter_context(Polite(port.address, port.asks)) for port in ports if port.asks]
        await _attack(strangers, share - share // 4)
    _tell(strangers, seed, time.monotonic() - started)
    for server, health in healths.items():
        await _require_unharmed(server, health, before[server])
    for polite in polites:
        print(f"  {polite.address}{polite.path}: {polite.num_answers} answers, {polite.worst_seconds:.3f} s at worst")
        assert polite.num_answers > 0
        assert not polite.failures, polite.failures[:5]
        assert polite.worst_seconds < MOST_SECONDS_BY_CLOCK
    assert not [status for stranger in strangers for status in stranger.statuses if status in _BUG_STATUSES]


async def _attack(strangers: Sequence[Stranger], count: int) -> None:
    """All ports at once; slow connections go with the last attack."""
    await asyncio.gather(*(stranger.run(count) for stranger in strangers))
    await asyncio.gather(*(stranger.close() for stranger in strangers))


def _tell(strangers: Sequence[Stranger], seed: str, seconds: float) -> None:
    counts, statuses = Counter[str](), Counter[str]()
    for stranger in strangers:
        counts += stranger.counts
        statuses += stranger.statuses
    num_requests = sum(stranger.requests for stranger in strangers)
    print(f"\nseed {seed}: {counts.total()} attacks of {num_requests} requests or frames in {seconds:.0f} s")
    print("  " + ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    print("  statuses of HTTP: " + ", ".join(f"{status} {number}" for status, number in sorted(statuses.items())))


async def _require_unharmed(server: ServerProcess, health: HealthProbe, before: int) -> None:
    after = await _settled_rss(server, before)
    print(
        f"  {server.module}: health {health.worst_seconds:.3f} s at worst, {health.worst_busy_seconds:.3f} s of it "
        f"computing; memory {before >> 20} MiB before, {after >> 20} MiB after"
    )
    assert server.is_alive, server.log[-3000:]
    assert not tracebacks(server.log), "\n".join(tracebacks(server.log)[:5])[:6000]
    assert not await asyncio.to_thread(_bugs_counted, server)
    assert health.num_answers > 0
    assert health.worst_busy_seconds < MOST_HEALTH_SECONDS
    assert health.worst_seconds < MOST_SECONDS_BY_CLOCK
    assert after < before * MEMORY_FACTOR + MEMORY_SLACK_BYTES


async def _settled_rss(server: ServerProcess, goal: int) -> int:
    for _ in range(50):
        if server.rss_bytes <= goal * MEMORY_FACTOR:
            break
        await asyncio.sleep(0.1)
    return server.rss_bytes


def _bugs_counted(server: ServerProcess) -> list[str]:
    """Calls that the server answered with a status which says that it has a bug."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=60) as reply:  # ours
        text = reply.read().decode()
    assert "headrace_rpc_calls" in text
    return re.findall(r'^headrace_rpc_calls_total\{code="(?:INTERNAL|UNKNOWN)".*$', text, re.MULTILINE)
