"""One slot of the fleet, and the process in it."""

from __future__ import annotations

import secrets
import time
from enum import StrEnum

from services.rollout.engine.client import EngineClient
from services.rollout.engine.process import EngineProcess
from services.rollout.engine.slots import EngineSlot
from services.rollout.engine.weights import INITIAL_VERSION

_FORGIVEN_BAD_ANSWERS = 2


class EngineState(StrEnum):
    """The proto's EngineState without its prefix."""

    STARTING = "STARTING"
    READY = "READY"
    UPDATING = "UPDATING"
    STALE = "STALE"
    DOWN = "DOWN"
    QUARANTINED = "QUARANTINED"
    LEAVING = "LEAVING"
    RELEASED = "RELEASED"


class Engine:
    """One slot of the fleet. The process in it changes; `incarnation` tells which one it is."""

    def __init__(self, number: int, slot: EngineSlot) -> None:
        self.engine_id = f"engine-{number}"
        self.number = number
        self.tensor_parallel_size, self.group = slot.tensor_parallel_size, slot.group
        self.state = EngineState.STARTING
        self.policy_version = INITIAL_VERSION
        self.restarts = 0
        self.incarnation = ""
        """The current process: no other has it, nor one of an engine that had this number before."""
        self.weights_digest = ""
        self.weights_name = ""
        self.is_suspect = False
        self.bad_answers = 0
        self.distrust = ""
        """Why it may serve no more; empty while it may."""
        self.trouble = ""
        """Why its process was ended last; empty if none was."""
        self.has_served = False
        """True once it was in routing."""
        self._short_lives = 0
        self._serves_since = 0.0
        self.process: EngineProcess | None = None
        self._client: EngineClient | None = None

    @property
    def url(self) -> str:
        """The current HTTP address; empty before the first start."""
        return self.process.url if self.process else ""

    @property
    def is_leaving(self) -> bool:
        """True from the moment from which it gets no more requests, for good."""
        return self.state is EngineState.LEAVING

    @property
    def client(self) -> EngineClient:
        """The client of the current process."""
        if self._client is None:
            assert self.process is not None, f"{self.engine_id} was never started"
            self._client = EngineClient(self.process.url)  # which another machine may choose when it starts it
        return self._client

    async def occupy(self, process: EngineProcess) -> None:
        """Puts another process in the slot."""
        if self._client:
            await self._client.close()
        self.incarnation = f"{self.engine_id}#{secrets.token_hex(4)}"
        self.is_suspect, self.bad_answers, self.distrust = False, 0, ""
        self.process, self._client = process, None

    async def leave(self) -> None:
        if self._client:
            await self._client.close()
        if self.process:
            await self.process.stop()

    def began_to_serve(self) -> None:
        self._serves_since = time.monotonic()

    def ended(self, why: str, good_seconds: float) -> int:
        """Notes why its process ended, and returns how many have ended one after the other before `good_seconds`."""
        if self._serves_since and time.monotonic() - self._serves_since >= good_seconds:
            self._short_lives = 0
        self.trouble, self._serves_since = why, 0.0
        self._short_lives += 1
        return self._short_lives

    def bad_answer(self, why: str) -> None:
        """Counts a bad response; after too many the engine is distrusted."""
        self.bad_answers += 1
        if self.bad_answers > _FORGIVEN_BAD_ANSWERS:
            self.distrust = f"gave {self.bad_answers} bad answers, the last: {why}"
