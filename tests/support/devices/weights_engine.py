"""A fake engine with memory on a shared device that loads real weights.

`python -m tests.support.devices.weights_engine PORT NUMBER DEVICE` is one in a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.rpc.net import free_port
from services.rollout.engine.process import ServerProcess
from tests.support.devices.memory_engine import MemoryEngine
from tests.support.devices.shared_device import SharedDevice
from tests.support.fakes.gloo_engine import GlooEngine
from tests.support.processes.training_run import ROOT


class WeightsEngine(MemoryEngine, GlooEngine):
    """What it loaded last stays here for a test, after it released it."""

    last_loaded: Mapping[str, torch.Tensor]

    def _load_tensors(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._load_tensors(body)
        self.last_loaded = self.tensors
        return answer


class WeightsEngineProcess(ServerProcess):
    """In a process of its own."""

    def __init__(self, number: int, device: Path, log_path: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.devices.weights_engine", str(port), str(number), str(device)]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(f"http://127.0.0.1:{port}", command, log_path, environment)


async def main(port: str, number: str, device: str) -> None:
    await WeightsEngine(int(number), SharedDevice(Path(device)), int(port)).start(seconds=60)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
