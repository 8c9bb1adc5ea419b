"""Asks a run's services for their state once a second. A service may be silent: it restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from headrace.cli.view.run_view import RunView
from headrace.client.open import open_buffer, open_rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError

_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0

T = TypeVar("T")


async def follow(address_of: Callable[[str], str], view: RunView, *, alone: bool = False) -> None:
    """Feeds the view until it is cancelled. `address_of` knows where a service is; `alone`: the trainer is all."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_progress(address_of, view))
        tasks.create_task(_status(address_of, view))
        if alone:
            return
        tasks.create_task(_fleet(address_of, view))
        tasks.create_task(_stats(address_of, view))


async def _progress(address_of: Callable[[str], str], view: RunView) -> None:
    step = 0
    async with TrainerClient(address_of("trainer")) as trainer:
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                async for row in trainer.watch_progress(step):
                    step = row.step  # it may have another row: evaluation comes after training
                    view.on_progress(row)
            await asyncio.sleep(_PAUSE_SECONDS)


async def _status(address_of: Callable[[str], str], view: RunView) -> None:
    async with TrainerClient(address_of("trainer"), deadline_seconds=_PATIENCE_SECONDS) as trainer:
        await _asked(view, "trainer", trainer.status, view.on_status)


async def _stats(address_of: Callable[[str], str], view: RunView) -> None:
    async with open_buffer(address_of("buffer"), deadline_seconds=_PATIENCE_SECONDS) as buffer:
        await _asked(view, "buffer", lambda: buffer.stats("train"), view.on_stats)


async def _fleet(address_of: Callable[[str], str], view: RunView) -> None:
    async with open_rollout(address_of("rollout"), deadline_seconds=_PATIENCE_SECONDS) as rollout:
        await _asked(view, "rollout", rollout.get_fleet, view.on_fleet)


async def _asked(view: RunView, service: str, ask: Callable[[], Awaitable[T]], on_answer: Callable[[T], None]) -> None:
    while True:
        try:
            on_answer(await ask())
        except HeadraceError:  # it starts or restarts: ask again
            view.on_silence(service)
        await asyncio.sleep(_PAUSE_SECONDS)
