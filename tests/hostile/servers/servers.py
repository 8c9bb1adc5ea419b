"""Services as processes of their own, with limited memory, to be attacked, killed and looked at from outside."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.process.linux import resident_bytes
from headrace.rpc.net import free_port

ROOT = Path(__file__).parents[3]
MOST_ADDRESS_SPACE = 12 << 30
"""An attack that fills memory must hit its service and not the machine."""
START_SECONDS = 120.0


class ServerProcess:
    """`python -m MODULE --address HOST:PORT …`, started as often as one likes; its log goes on."""

    def __init__(self, module: str, folder: Path, arguments: Sequence[str]) -> None:
        self.module = module
        self.address = f"127.0.0.1:{free_port()}"
        self.log_path = folder / f"{module}.log"
        self.metrics_address = f"127.0.0.1:{free_port()}"
        self._arguments = [*arguments, "--address", self.address, "--metrics-address", self.metrics_address]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when health says SERVING."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            *self._arguments,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.log_path.open("a"),
            stderr=self.log_path.open("a"),
        )
        resource.prlimit(self.pid, resource.RLIMIT_AS, (MOST_ADDRESS_SPACE, MOST_ADDRESS_SPACE))
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(START_SECONDS):
                while True:
                    assert self.is_alive, self.log[-3000:]
                    try:
                        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.1)
                        continue
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """`kill -9`; nothing where it was never started, so that the others of a test that failed to start end."""
        if self._process is not None:
            await self.end(signal.SIGKILL)

    async def end(self, number: signal.Signals) -> int:
        """Its exit status after this signal."""
        assert self._process
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def rss_bytes(self) -> int:
        assert self.is_alive, f"{self.module} ended: {self.log[-3000:]}"
        return resident_bytes(self.pid)

    async def settled_rss(self, goal: int, most_seconds: float) -> int:
        """The memory once it had the time to give back what it no longer needs."""
        end = time.monotonic() + most_seconds
        while self.rss_bytes > goal and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return self.rss_bytes


def tracebacks(log: str) -> list[str]:
    """What a service wrote that is a bug of its own: a traceback, a call that failed, a task's lost exception."""
    lines = log.splitlines()
    found = []
    for i, line in enumerate(lines):
        if "Traceback (most recent call last)" in line or "never retrieved" in line or '"call_failed"' in line:
            found.append("\n".join(lines[i : i + 60])[:6000])
    return found


def buffer_process(folder: Path, job: dict[str, object]) -> ServerProcess:
    """The ledger on `folder`/ledger; the job's sections as given."""
    config = folder / "job.json"
    config.write_text(json.dumps({"model": {"hf_checkpoint": "/none"}, **job}))
    arguments = ["--config", str(config), "--data-dir", str(folder / "ledger")]
    return ServerProcess("services.buffer", folder, arguments)


def reward_process(folder: Path) -> ServerProcess:
    """The built-in scorers."""
    return ServerProcess(
        "services.reward", folder, ["--rm-type", "math", "--reward-workers", "2", "--reward-timeout-seconds", "3"]
    )


def rollout_process(folder: Path, buffer_address: str, reward_address: str) -> ServerProcess:
    """The whole service with its router, on fake engines."""
    arguments = ["--folder", str(folder), "--buffer", buffer_address, "--reward", reward_address]
    return ServerProcess("tests.hostile.servers.serve_rollout", folder, arguments)


def trainer_process(folder: Path, *, step_seconds: float = 0.02) -> ServerProcess:
    """The real servicer and loop over ranks that only write down what they do; its report grows with each step."""
    arguments = ["--folder", str(folder), "--step-seconds", str(step_seconds)]
    return ServerProcess("tests.hostile.servers.serve_trainer", folder, arguments)
