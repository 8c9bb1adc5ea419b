"""A fake engine with memory on a device that it shares, as strict as SGLang: it ends where that would end."""

from __future__ import annotations

from aiohttp import web

from tests.support.devices.shared_device import SharedDevice
from tests.support.fakes.fake_engine import FakeEngine

_NEED_MEMORY = ("/update_weights_from_disk", "/weights_checker", "/continue_generation")


class MemoryEngine(FakeEngine):
    """It takes memory when it starts."""

    def __init__(
        self, number: int, device: SharedDevice, port: int | None = None, *, token_seconds: float = 0.0
    ) -> None:
        super().__init__(port=port, token_seconds=token_seconds)
        self._name = f"engine-{number}"
        self._device = device
        self.holds = False
        self._stops = False

    async def start(self, *, seconds: float) -> None:
        self._take()
        await super().start(seconds=seconds)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Whoever comes second, of those who end it, waits for nothing."""
        self.die(0)
        if not self._stops:
            self._stops = True
            await super().stop(grace_seconds)

    def die(self, code: int = -9) -> None:
        self._device.give(self._name)
        super().die(code)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, fault = request.path, self.faults.get(request.path)
        if path == "/release_memory_occupation" and fault is None:
            if self.num_in_flight or not self.holds:
                return self._end(f"{path} with {self.num_in_flight} requests, and memory: {self.holds}")
            self.holds = False
            self._device.give(self._name)
        if path == "/resume_memory_occupation" and fault is None:
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
