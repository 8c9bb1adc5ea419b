"""Saves and exports that people ask for: they wait for the end of a step, when no rank computes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import Fenced, HeadraceError, ResourceExhausted
from headrace.rpc.log import log
from services.trainer.state import TrainState

MAX_REQUESTS = 64
"""Saves and exports that may wait for the end of a step."""


class Steered(Protocol):
    """The ranks' methods that requests need."""

    async def save(self, state: TrainState) -> None:
        """Takes a checkpoint of the current step."""

    async def flush(self) -> None:
        """Returns when the checkpoint that was taken last is safe."""

    def checkpoint_path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""

    async def export_to(self, path: Path) -> None:
        """Writes a Hugging Face folder."""


Action = Callable[[Steered, TrainState], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Request:
    action: Action
    done: asyncio.Future[TrainState]


class Requests:
    """The actions that wait, in order. A failure is its caller's alone."""

    def __init__(self) -> None:
        self._waiting: list[_Request] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, action: Action) -> asyncio.Future[TrainState]:
        """Returns the state that the action will have run in. Raises ResourceExhausted where too many wait."""
        if len(self._waiting) >= MAX_REQUESTS:
            raise ResourceExhausted(
                f"{MAX_REQUESTS} saves and exports wait for the end of the step: ask again after it"
            )
        request = _Request(action, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        return request.done

    async def serve(self, ranks: Steered, state: TrainState) -> None:
        """Runs what waits. Raises Fenced where the trainer is not the newest any more."""
        while self._waiting:
            request = self._waiting[0]  # it stays in the list while it is served: `refuse` answers what is left
            try:
                await request.action(ranks, state)
            except Fenced as error:
                self._waiting.remove(request)
                request.done.set_exception(error)
                raise
            except HeadraceError as error:
                self._waiting.remove(request)
                request.done.set_exception(error)
                log.warning("request_failed", step=state.step, reason=error.reason, error=error.message)
            else:
                self._waiting.remove(request)
                request.done.set_result(state)

    def refuse(self, error: Callable[[], HeadraceError]) -> None:
        """Answers what waits with an error each."""
        for request in self._waiting:
            request.done.set_exception(error())
        self._waiting.clear()
