"""All ranks as one: rank 0 sends a command to the others and executes it itself, one command at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import HeadraceError
from headrace.rpc.log import log
from services.trainer.control.channel import Control
from services.trainer.control.commands import Command, Export, Leave, Save
from services.trainer.control.worker import Worker
from services.trainer.data.reading import Unreadable


class Crew:
    """Lives on rank 0. The compute thread executes, so the event loop answers in the middle of a step."""

    def __init__(self, control: Control, worker: Worker, compute: ThreadPoolExecutor) -> None:
        self._control = control
        self._worker = worker
        self._compute = compute

    async def run(self, command: Command) -> dict[str, float]:
        """Rank 0's result once rank 0 is done; collectives inside keep the others in step."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, self._execute, command)

    @property
    def set_aside(self) -> Sequence[Unreadable]:
        """Samples that the latest Train could not use; equal on all ranks."""
        return self._worker.set_aside

    async def leave(self) -> None:
        """Lets the other ranks end."""
        await self.run(Leave())

    def _execute(self, command: Command) -> dict[str, float]:
        self._control.send(command)
        return self._worker.execute(command)


def follow(control: Control, worker: Worker) -> None:
    """What every other rank does until rank 0 says Leave."""
    for command in control.receive():
        try:
            worker.execute(command)
        except HeadraceError as error:
            if not isinstance(command, Save | Export):
                raise
            log.warning("files_failed", reason=error.reason, error=error.message)  # rank 0 has it too and decides
    worker.execute(Leave())
