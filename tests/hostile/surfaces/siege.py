"""Ports under attack while well-behaved clients go on, and all that holds afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor

from tests.hostile.servers.servers import ServerProcess, tracebacks
from tests.hostile.surfaces.attack import Maker
from tests.hostile.surfaces.grpc_attacks import of_grpc
from tests.hostile.surfaces.http_attacks import of_http
from tests.hostile.surfaces.polite import Polite
from tests.hostile.surfaces.stranger import Stranger
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER
from tests.support.processes.health_probe import HealthProbe

MEMORY_FACTOR = 1.1
MOST_SETTLING_SECONDS = 90.0
WARM_UP = 50
"""Attacks on each port before its memory is looked at: each kind loads and allocates what is needed once."""
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


async def besiege(
    ports: Sequence[Port],
    count: int,
    seed: str,
    *,
    slack_bytes: int = 0,
) -> None:
    """So many attacks on all ports together, after the first `WARM_UP` on each.

    `slack_bytes` is what may be held beyond the factor, where the attacks are few beside what a service does besides.
    """
    strangers = {port: Stranger(port.address, port.path, port.makes, seed) for port in ports}
    await _attack(strangers.values(), WARM_UP)
    servers = list(dict.fromkeys(port.server for port in ports))
    before, started = {server: server.rss_bytes for server in servers}, time.monotonic()
    with contextlib.ExitStack() as watching:
        healths = {
            server: watching.enter_context(HealthProbe(server.address, lambda server=server: server.pid))
            for server in servers
        }
        polites = [watching.enter_context(Polite(port.address, port.asks)) for port in ports if port.asks]
        await _attack(strangers.values(), count // len(ports))
    _tell(strangers.values(), seed, time.monotonic() - started)
    harm = list[str]()
    for server, health in healths.items():
        of_server = [stranger for port, stranger in strangers.items() if port.server is server]
        harm += await _harm(server, of_server, before[server], slack_bytes)
        harm += _held_up(server, health)
    for polite in polites:
        said = f"{polite.address}{polite.path}: {polite.num_answers} answers, {polite.worst_seconds:.3f} s at worst"
        print(f"  {said}")
        if polite.failures or not polite.num_answers:
            harm.append(f"{said}, failures: {polite.failures[:5]}")
    statuses = [status for stranger in strangers.values() for status in stranger.statuses]
    harm += [f"HTTP {status}" for status in statuses if status in _BUG_STATUSES]
    assert not harm, "\n".join(harm)


async def _attack(strangers: Collection[Stranger], count: int) -> None:
    """All ports at once; slow connections go with the last attack."""
    await asyncio.gather(*(stranger.run(count) for stranger in strangers))
    await asyncio.gather(*(stranger.close() for stranger in strangers))


def _tell(strangers: Collection[Stranger], seed: str, seconds: float) -> None:
    counts, statuses = Counter[str](), Counter[str]()
    for stranger in strangers:
        counts += stranger.counts
        statuses += stranger.statuses
    num_requests = sum(stranger.requests for stranger in strangers)
    print(f"\nseed {seed}: {counts.total()} attacks of {num_requests} requests or frames in {seconds:.0f} s")
    print("  " + ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    print("  statuses of HTTP: " + ", ".join(f"{status} {number}" for status, number in sorted(statuses.items())))


async def _harm(server: ServerProcess, strangers: Collection[Stranger], before: int, slack_bytes: int) -> list[str]:
    """What does not hold of a server after the attacks on its ports; its figures are printed either way."""
    at_end, ended = server.rss_bytes, time.monotonic()
    most = round(before * MEMORY_FACTOR) + slack_bytes
    after = await server.settled_rss(most, MOST_SETTLING_SECONDS)
    bugs = await asyncio.to_thread(_bugs_counted, server)
    print(
        f"  {server.module}: {sum(each.counts.total() for each in strangers)} attacks of "
        f"{sum(each.requests for each in strangers)} requests or frames, {len(bugs)} INTERNAL or UNKNOWN; memory "
        f"{before >> 20} MiB before, {at_end >> 20} MiB at the end, {after >> 20} MiB {time.monotonic() - ended:.0f} s "
        "later"
    )
    harm = [f"{server.module}: {each}" for each in (*tracebacks(server.log)[:5], *bugs)]
    if not server.is_alive:
        harm.append(f"{server.module} has ended:\n{server.log[-3000:]}")
    if after > most:
        harm.append(f"{server.module} holds {after} bytes, {most} at most")
    return harm


def _held_up(server: ServerProcess, health: HealthProbe) -> list[str]:
    figures = (
        f"{server.module}: health {health.num_answers} answers, {health.num_refused} refused, "
        f"{health.worst_seconds:.3f} s at worst, {health.worst_busy_seconds:.3f} s of it computing"
    )
    print(f"  {figures}")
    return [] if health.num_answers > 0 and not health.num_refused else [figures]


def _bugs_counted(server: ServerProcess) -> list[str]:
    """Calls that the server answered with a status which says that it has a bug."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=60) as reply:  # ours
        text = reply.read().decode()
    assert "headrace_rpc_calls" in text
    return re.findall(r'^headrace_rpc_calls_total\{code="(?:INTERNAL|UNKNOWN)".*$', text, re.MULTILINE)
