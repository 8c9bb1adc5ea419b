"""Hosts for tests: each a network namespace with an address of its own, and processes in it that are ended by pid."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.rpc.net import Address
from tests.support.hosts.switch import Switch, hardware_address
from tests.support.processes.training_run import ROOT

NAMES = ("buffer", "rollout", "reward", "trainer")
_END_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the test's network."""

    name: str
    number: int
    namespace: str
    has_ipv6: bool = False
    """Then it has no other address."""

    @property
    def address(self) -> str:
        """Nobody outside of the test's own hosts can reach it, so that other tests may have the same."""
        return f"fd77::{self.number}" if self.has_ipv6 else f"10.77.0.{self.number}"

    @property
    def own_files(self) -> Path:
        """What is here is in /etc for the processes of the host (`man ip-netns`)."""
        return Path("/etc/netns") / self.namespace

    def at(self, port: int) -> str:
        """The port at its address."""
        return str(Address(self.address, port))

    def command(self, words: Sequence[str]) -> list[str]:
        """The words as a command in this host; its process is the command itself."""
        return ["ip", "netns", "exec", self.namespace, *words]

    @asynccontextmanager
    async def running(
        self, log: Path, *words: str, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Ended by SIGTERM when the block is left, by SIGKILL when that does not help."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self.command(words), cwd=ROOT, env=_environment(environment), stdout=output, stderr=output
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _END_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()

    async def said(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command prints that ends by itself and does not fail."""
        code, output = await self._ended(words, environment)
        assert code == 0, output
        return output

    async def refused(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command prints that fails."""
        code, output = await self._ended(words, environment)
        assert code, output
        return output

    async def _ended(self, words: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *self.command(words),
            cwd=ROOT,
            env=_environment(environment),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode, output.decode()


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts by name, with a switch between them."""

    hosts: Mapping[str, Host]


@contextmanager
def network(
    names: Sequence[str] = NAMES, *, ipv6: bool = False, bits_per_second: float | None = None
) -> Iterator[Network]:
    """A network of these hosts. Skips the test where no network namespace can be made."""
    run = uuid.uuid4().hex[:8]
    hosts = {name: Host(name, number, f"headrace-{run}-{name}", ipv6) for number, name in enumerate(names, 1)}
    switch, made = Switch(bits_per_second), list[Host]()
    try:
        for host in hosts.values():
            if (refused := _refusal("netns", "add", host.namespace)) is not None:
                pytest.skip(f"several hosts need network namespaces, which are refused here: {refused}")
            made.append(host)
            _name_hosts(host, hosts.values())
            _plug_in(host, switch, f"hr{run}{host.number}")
        switch.start()
        yield Network(hosts)
    finally:
        switch.close()
        for host in made:
            _ip("netns", "del", host.namespace)
            shutil.rmtree(host.own_files)


def _name_hosts(host: Host, hosts: Iterable[Host]) -> None:
    """Each knows the others by name. Its own name, and the machine's, mean 127.0.1.1, as Debian has it."""
    host.own_files.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name} {socket.gethostname()}"]
    lines += [f"{other.address} {other.name}" for other in hosts if other is not host]
    (host.own_files / "hosts").write_text("\n".join(lines) + "\n")


def _plug_in(host: Host, switch: Switch, interface: str) -> None:
    try:
        switch.add(host.number, interface)
    except OSError as error:
        pytest.skip(f"several hosts need TAP devices, which are refused here: {error}")
    _ip("link", "set", interface, "netns", host.namespace, "name", "eth0")
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "link", "set", "eth0", "address", hardware_address(host.number))
    if host.has_ipv6:  # nodad: at once, without asking whether somebody else has it
        _ip("-n", host.namespace, "address", "add", f"{host.address}/64", "dev", "eth0", "nodad")
    else:
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")


def _ip(*words: str) -> None:
    assert (refused := _refusal(*words)) is None, refused


def _refusal(*words: str) -> str | None:
    """What `ip` says when it refuses; None when it does not."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return "there is no command `ip` (Debian: apt-get install iproute2)"
    return None if done.returncode == 0 else done.stderr.strip() or f"ip {' '.join(words)} failed"


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """Without the tests' own variables, which would be unknown ones of the job."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return mine | {"PYTHONPATH": str(ROOT)} | dict(more or {})
