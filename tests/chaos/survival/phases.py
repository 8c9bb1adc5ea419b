"""Waits for a run to be in a phase: the next time from now on, within milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path

from headrace.client.buffer import BufferClient
from headrace.run_folder import RunFolder
from tests.support.processes.stand_in_run import StandInRun

_EVENTS: Mapping[str, str] = {
    "lease": "leased",
    "put": "put",
    "batch": "batched",
    "consume": "consumed",
    "commit": "committed",
}
_LOOK_SECONDS = 0.001
PHASES = (*_EVENTS, "checkpoint", "publish", "backup")
"""`backup` is one that this program asks for."""


async def until_phase(run: StandInRun, phase: str) -> None:
    """Raises TimeoutError when it does not come in two minutes, AssertionError when the run ends before it."""
    folder = run.run.folder
    async with asyncio.timeout(120):
        if phase in _EVENTS:
            await _until_event(run, _EVENTS[phase])
        elif phase == "checkpoint":
            await _until(lambda: any(_checkpoints(folder).glob(".draft-*")))
        elif phase == "publish":
            log = folder.logs / "rollout.log"
            begun = _count(log)
            await _until(lambda: _count(log) > begun)
        else:
            assert phase == "backup", phase


async def _until_event(run: StandInRun, kind: str) -> None:
    async with BufferClient(await run.run.address_of("buffer")) as client:
        position = await client.position()
        async with aclosing(client.watch("train", position + 1)) as events:
            async for event in events:
                if event.kind == kind:
                    return


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(_LOOK_SECONDS)


def _checkpoints(folder: RunFolder) -> Path:
    return folder.path / "checkpoints"


def _count(log: Path) -> int:
    return log.read_bytes().count(b'"publication_begun"')
