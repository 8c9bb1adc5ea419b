"""One slot of the fleet, and the process in it."""

from __future__ import annotations

from enum import StrEnum

from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import EngineProcess
from services.rollout.engine.weights import INITIAL_VERSION

_FORGIVEN_BAD_ANSWERS = 2


class EngineState(StrEnum):
    """The proto's EngineState without its prefix."""

    STARTING = "STARTING"
    READY = "READY"
    UPDATING = "UPDATING"
    STALE = "STALE"
    DOWN = "DOWN"


class Engine:
    """One slot of the fleet. The process in it changes; `restarts` tells which one it is."""

    def __init__(self, number: int, tensor_parallel_size: int) -> None:
        self.engine_id = f"engine-{number}"
        self.number = number
        self.tensor_parallel_size = tensor_parallel_size
        self.state = EngineState.STARTING
        self.policy_version = INITIAL_VERSION
        self.restarts = 0
        self.weights_digest = ""
        self.weights_name = ""
        self.is_suspect = False
        self.bad_answers = 0
        self.distrust = ""
        """Why it may serve no more; empty while it may."""
        self.process: EngineProcess | None = None
        self._client: EngineClient | None = None

    @property
    def url(self) -> str:
        """The current HTTP address; empty before the first start."""
        return self.process.url if self.process else ""

    @property
    def client(self) -> EngineClient:
        """The client of the current process."""
        assert self._client is not None, f"{self.engine_id} was never started"
        return self._client

    @property
    def incarnation(self) -> str:
        """It changes with the process."""
        return f"{self.engine_id}#{self.restarts}"

    async def occupy(self, process: EngineProcess) -> None:
        """Puts another process in the slot."""
        if self._client:
            await self._client.close()
        self.is_suspect, self.bad_answers, self.distrust = False, 0, ""
        self.process, self._client = process, EngineClient(process.url)

    async def leave(self) -> None:
        if self._client:
            await self._client.close()
        if self.process:
            await self.process.stop()

    def bad_answer(self, why: str) -> None:
        """Counts a bad response; after too many the engine is distrusted."""
        self.bad_answers += 1
        if self.bad_answers > _FORGIVEN_BAD_ANSWERS:
            self.distrust = f"gave {self.bad_answers} bad answers, the last: {why}"
