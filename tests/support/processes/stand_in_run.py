"""`headrace train` with all four services and ranks as they are, on one engine that has no model and its own process.

The engine takes real weights (gloo) and gives tokens at once, so a step lasts a fraction of a second: time enough to
hurt each process in each phase, and to run for hours.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.rpc.net import free_port
from tests.support.hosts import reward
from tests.support.processes.training_run import ROOT, SUMS, TrainingRun
from tests.support.processes.with_constants import python_with


class StandInRun:
    """The run, and its engine's process: started, killed and started again at the same port."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *flags: str,
        prompts: Sequence[Mapping[str, Any]] = SUMS,
        environment: Mapping[str, str] | None = None,
        token_seconds: float = 0.002,
        reward_file: Path | None = None,
        constants: Sequence[str] = (),
    ) -> None:
        """`constants` are the buffer's, as MODULE:NAME=VALUE."""
        self.engine_port = free_port()
        self.engine: asyncio.subprocess.Process | None = None
        self._engine_log = folder / "engine.log"
        self._token_seconds = token_seconds
        self._environment = dict(environment or {})
        self.run = TrainingRun(
            folder, checkpoint,
            "--rollout-external-engine-addrs", f"127.0.0.1:{self.engine_port}",
            "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--micro-batch-size", "2",
            "--rollout-max-response-len", "8", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
            "--lr", "1e-6", "--update-weight-probe-tolerance", "1e6",  # the engine has no model to compare with
            "--custom-rm-path", f"{reward_file or Path(reward.__file__)}:judge",
            "--buffer-python", python_with("services.buffer.build:LEASE_SECONDS=3.0", *constants),
            "--rollout-health-check-interval", "0.5",
            # The engine gives a group's samples the same tokens: advantages that sum to 0 in it would teach nothing.
            "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages",
            *flags,
            prompts=prompts, name="survive", environment=self._environment,
        )  # fmt: skip

    async def start_engine(self) -> None:
        """Returns at once; the rollout service waits for it."""
        with self._engine_log.open("ab") as log:
            self.engine = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.support.fakes.gloo_engine",
                str(self.engine_port),
                "",
                str(self._token_seconds),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._environment},
                stdout=log,
                stderr=log,
            )

    async def kill_engine(self) -> None:
        """`kill -9`."""
        if self.engine and self.engine.returncode is None:
            self.engine.kill()
            await self.engine.wait()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[StandInRun]:
        """Everything has ended when the block is left."""
        await self.start_engine()
        try:
            async with self.run.started():
                yield self
        finally:
            await self.kill_engine()

    def pid(self, service: str) -> int:
        """Of the service as it runs now."""
        found = self.run.folder.services()[service].pid
        assert found is not None, service
        return found
