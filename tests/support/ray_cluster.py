"""A real Ray for tests: a raylet in each of several network namespaces, each with an address and CPUs of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.process.linux import descendants
from tests.support.hosts.hosts import Host, network

_STORE_BYTES = 80 << 20
_START_SECONDS = 120.0
_PORT, _JOBS_PORT = 6379, 8265  # every host has its own
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass
class RayCluster:
    """The cluster; each node is a host by its name."""

    folder: Path
    hosts: Mapping[str, Host]
    address: str
    nodes: dict[str, asyncio.subprocess.Process]
    stack: AsyncExitStack
    environment: Mapping[str, str]
    """Of its nodes and of whoever calls them: they have a token, without which Ray takes no second machine."""

    @property
    def head(self) -> Host:
        """The host of the first node."""
        return next(iter(self.hosts.values()))

    @property
    def jobs(self) -> str:
        """Where jobs are submitted."""
        return f"http://{self.head.address}:{_JOBS_PORT}"

    async def start(self, name: str, num_cpus: int, *, takes_jobs: bool = False) -> None:
        """Starts the node's raylet, and on the first host the head."""
        host = self.hosts[name]
        is_head = host is self.head
        jobs = (f"--dashboard-host={host.address}", f"--dashboard-port={_JOBS_PORT}") if takes_jobs else ()
        head = ("--head", f"--port={_PORT}", f"--include-dashboard={takes_jobs}", *jobs)
        where = head if is_head else (f"--address={self.address}",)
        words = (
            *(*_RAY, "start", "--block", *where, f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}"),
            *(f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"),
            *((f"--temp-dir={self.folder}",) if is_head else ()),
        )
        log = self.folder / f"{name}.log"
        started = log.stat().st_size if log.exists() else 0
        node = await self.stack.enter_async_context(host.running(log, *words, environment=self.environment))
        self.nodes[name] = node
        end = asyncio.get_running_loop().time() + _START_SECONDS
        while b"Ray runtime started" not in (said := log.read_bytes()[started:]):
            assert node.returncode is None, said.decode()
            assert asyncio.get_running_loop().time() < end, said.decode()
            await asyncio.sleep(0.1)

    async def kill(self, name: str) -> None:
        """`kill -9` of all that the node has started, and of what its raylet has."""
        node = self.nodes[name]
        for pid in [*descendants(node.pid), node.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await node.wait()


@asynccontextmanager
async def ray_cluster(
    folder: Path, *names: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[RayCluster]:
    """Hosts without a raylet yet. Skips the test where no network namespace can be made."""
    folder.mkdir(parents=True)
    with network(names) as hosts:
        async with AsyncExitStack() as stack:
            head = hosts.hosts[names[0]]
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            address = f"{head.address}:{_PORT}"
            yield RayCluster(folder, hosts.hosts, address, {}, stack, token | dict(environment or {}))
