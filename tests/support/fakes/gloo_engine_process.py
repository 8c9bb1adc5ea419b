"""A GlooEngine in a process of its own, which can be killed as a real one can."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.rpc.net import free_port
from services.rollout.engine.process import ServerProcess
from tests.support.processes.training_run import ROOT


class GlooEngineProcess(ServerProcess):
    """It starts once `may_start` is set."""

    def __init__(self, log_path: Path, failpoint: str = "", may_start: asyncio.Event | None = None) -> None:
        port = free_port()
        words = [failpoint] if failpoint else []
        command = [sys.executable, "-m", "tests.support.fakes.gloo_engine", str(port), *words]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(f"http://127.0.0.1:{port}", command, log_path, environment)
        self._may_start = may_start

    async def start(self, *, seconds: float) -> None:
        if self._may_start:
            await self._may_start.wait()
        await super().start(seconds=seconds)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        await super().stop(grace_seconds)
