"""A fake engine with memory on a device that it shares, as strict as SGLang: it ends where that would.

`python -m tests.support.fakes.memory_engine PORT NUMBER DEVICE` is one in a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web

from headrace.rpc.net import free_port
from services.rollout.engine.process import ServerProcess
from tests.support.fakes.gloo_engine import GlooEngine
from tests.support.fakes.shared_device import SharedDevice
from tests.support.processes.training_run import ROOT

_NEED_MEMORY = ("/update_weights_from_disk", "/weights_checker", "/continue_generation")


class MemoryEngine(GlooEngine):
    """It takes memory when it starts."""

    def __init__(self, number: int, device: SharedDevice, port: int | None = None) -> None:
        super().__init__(port)
        self._name = f"engine-{number}"
        self._device = device
        self.holds = False

    async def start(self, *, seconds: float) -> None:
        self._take()
        await super().start(seconds=seconds)

    def die(self, code: int = -9) -> None:
        self._device.give(self._name)
        super().die(code)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/release_memory_occupation":
            if self.num_in_flight or not self.holds:
                return self._end(f"{path} with {self.num_in_flight} requests, and memory: {self.holds}")
            self.tensors, self.holds = {}, False
            self._device.give(self._name)
        if path == "/resume_memory_occupation":
            if self.holds:
                return self._end(f"{path} of an engine that has its memory")
            self._take()
        if path in _NEED_MEMORY and not self.holds:
            return self._end(f"{path} without memory")
        reply = await super()._answer(request)
        if path == "/update_weights_from_disk":
            self._device.note(f"{self._name} loads")
        return reply

    def _take(self) -> None:
        self._device.take("engines", self._name)
        self.holds = True

    def _end(self, why: str) -> web.Response:
        self._device.note(f"REFUSED {self._name}: {why}")
        self.die()
        return web.Response(status=503)


class MemoryEngineProcess(ServerProcess):
    """In a process of its own."""

    def __init__(self, number: int, device: Path, log_path: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.fakes.memory_engine", str(port), str(number), str(device)]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(f"http://127.0.0.1:{port}", command, log_path, environment)


async def main(port: str, number: str, device: str) -> None:
    await MemoryEngine(int(number), SharedDevice(Path(device)), int(port)).start(seconds=60)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
