"""A run whose four services have a host each: `headrace up SERVICE` as a person starts it, in folders of their own.

The trainer may have several hosts, each with ranks of its own; those share a folder. Callers meet with certificates,
and a tokens file has one for those whose certificate has no role.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.cli.authority import issue_client, issue_service
from headrace.rpc.access import Role, add_token
from headrace.rpc.net import free_port
from headrace.rpc.tls import OPERATOR
from headrace.run_folder import RunFolder
from tests.support.hosts import reward
from tests.support.hosts.hosts import NAMES, Host, Network
from tests.support.processes.training_run import SUMS

_PORTS = {"buffer": 7001, "rollout": 7002, "reward": 7003, "trainer": 7004}
_HEADRACE = (sys.executable, "-m", "headrace.cli.main")


class RunOnHosts:
    """Engines have no model and no process of SGLang; all else is real."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        checkpoint: Path,
        *flags: str,
        trainers: Sequence[str] = ("trainer",),
        ranks_per_host: int = 1,
    ) -> None:
        """The buffer is known by its host's name, which means loopback on the host itself: it listens everywhere."""
        self._network = network
        self._folder = folder
        self._trainers = trainers
        self._engine_port = free_port()
        self._tls, self.tokens = folder / "tls", folder / "tokens.json"
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
        self._flags = (
            *("--run-name", "run", "--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts)),
            *("--label-key", "label", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "8", "--micro-batch-size", "2"),
            *("--actor-num-nodes", str(len(trainers)), "--actor-num-gpus-per-node", str(ranks_per_host)),
            *("--rollout-num-gpus", "1", "--lr", "1e-6", "--update-weight-probe-tolerance", "1e6"),
            *("--rollout-external-engine-addrs", f"127.0.0.1:{self._engine_port}", "--tls-dir", str(self._tls)),
            *("--custom-rm-path", f"{Path(reward.__file__)}:judge", "--tokens-file", str(self.tokens)),
            *("--rollout-health-check-interval", "0.5"),
            # The engine gives a group's samples the same tokens: advantages that sum to 0 in it would teach nothing.
            *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
            *(word for name in NAMES for word in (f"--{name}-address", self.at(name))),
            *flags,
        )
        self._meeting: tuple[str, ...] = ()
        if len(trainers) > 1:
            self._meeting = ("--master-addr", self._host(trainers[0]).address, "--master-port", str(free_port()))
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[RunOnHosts]:
        """Makes the certificates, and starts an engine and the services in their order."""
        issue_service(self._tls, [], 1)
        issue_client(self._tls, "guests", None, 1)
        issue_client(self._tls, OPERATOR, Role.ADMIN, 1)
        self.guest_token = add_token(self.tokens, "guest", Role.VIEWER)
        async with self._stack:
            engine = ("-m", "tests.support.fakes.gloo_engine", str(self._engine_port))
            rollout = self._host("rollout")
            listens = {"GLOO_SOCKET_IFNAME": "eth0"}  # as docs/placement.md says of engines on machines of their own
            engine_log = self._folder / "engine.log"
            await self._stack.enter_async_context(
                rollout.running(engine_log, sys.executable, *engine, environment=listens)
            )
            for name in ("buffer", "reward", "rollout", *self._trainers):
                await self.start(name)
            yield self

    async def start(self, name: str) -> None:
        """Starts what runs on the host."""
        service, meeting = name, list[str]()
        if name in self._trainers:
            service, meeting = "trainer", [*self._meeting]
        if (rank := self._trainers.index(name) if name in self._trainers else 0) > 0:
            meeting += ["--node-rank", str(rank)]
        listens = ("--listen-host", "::" if ":" in self._host(name).address else "0.0.0.0") if name == "buffer" else ()  # noqa: S104
        words = (*_HEADRACE, "up", service, *self._flags, *meeting, *listens, "--run-dir", str(self._folder / service))
        log = self._folder / f"up-{name}.log"
        started = self._host(name).running(log, *words)
        self._processes[name] = await self._stack.enter_async_context(started)

    def folder_of(self, name: str) -> RunFolder:
        """The run's folder on that host."""
        return RunFolder(self._folder / name / "run")

    async def finished(self) -> None:
        """Waits for the trainer's end. Raises AssertionError with the logs' last lines unless it is a good one."""
        assert await self._processes["trainer"].wait() == 0, self.last_words()

    async def audited(self) -> str:
        """What `headrace audit` says on the trainer's host, which asks the buffer on its own."""
        return await self._host("trainer").said(*_HEADRACE, "audit", str(self.folder_of("trainer").path), "--deep")

    async def guest_said(self, *words: str) -> str:
        """What a command prints whose caller has a certificate without a role."""
        shown = {"HEADRACE_TLS_DIR": str(self._tls / "clients" / "guests")}
        return await self._host("reward").said(*words, environment=shown)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        path = self.folder_of("trainer").metrics
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def last_words(self) -> str:
        """The end of every log, for a failed assertion."""
        logs = [*sorted(self._folder.glob("*.log")), *sorted(self._folder.glob("*/run/logs/*.log"))]
        return "\n".join(f"── {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _host(self, name: str) -> Host:
        return self._network.hosts[name]

    def at(self, name: str) -> str:
        """The address of a service."""
        return f"{name}:{_PORTS[name]}" if name == "buffer" else self._host(name).at(_PORTS[name])
