"""A GlooEngine in a process of its own, which can be killed as a real one can."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.rpc.net import free_port
from services.rollout.child import ChildProcess
from services.rollout.engine.client import EngineClient
from tests.support.training_run import ROOT


class GlooEngineProcess:
    """An EngineProcess. It starts once `may_start` is set."""

    def __init__(self, log_path: Path, failpoint: str = "", may_start: asyncio.Event | None = None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [failpoint] if failpoint else []
        command = [sys.executable, "-m", "tests.support.gloo_engine", str(port), *words]
        self._child = ChildProcess(command, log_path, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        self._may_start = may_start

    async def start(self, *, seconds: float) -> None:
        if self._may_start:
            await self._may_start.wait()
        await self._child.start()
        async with asyncio.timeout(seconds), EngineClient(self.url) as client:
            while not await answers(client):
                assert self.exit_code is None, self.last_lines()
                await asyncio.sleep(0.05)  # another process's state

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        return self._child.exit_code

    async def wait(self) -> int:
        return await self._child.wait()

    async def stop(self, grace_seconds: float = 0.0) -> None:
        await self._child.stop(grace_seconds)

    def last_lines(self) -> str:
        return self._child.last_lines()


async def answers(client: EngineClient) -> bool:
    try:
        await client.weight_version(seconds=2.0)
    except HeadraceError:
        return False
    return True
