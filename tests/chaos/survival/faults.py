"""What is done to a run, and taken back.

A fault strikes, and heals; what it returns from `heal` is what it saw. A run must go on by itself after each.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.process.linux import descendants, parent_of, runs
from tests.support.faults.small_disk import SmallDisk
from tests.support.processes.stand_in_run import StandInRun

FULL_SECONDS = float(os.environ.get("HEADRACE_FULL_SECONDS", "2"))
_END_SECONDS = 300.0


class Fault(Protocol):
    """One kind of harm."""

    name: str

    async def strike(self, run: StandInRun) -> None:
        """Does it."""

    async def heal(self, run: StandInRun) -> None:
        """Ends it; a process that was killed is the supervisor's to start."""


class FullDisk:
    """A disk without a byte for some seconds: what is deleted on it is filled again."""

    def __init__(self, name: str, disk: SmallDisk) -> None:
        self.name = f"disk full: {name}"
        self._disk = disk

    async def strike(self, run: StandInRun) -> None:
        self._disk.fill()

    async def heal(self, run: StandInRun) -> None:
        end = asyncio.get_running_loop().time() + FULL_SECONDS
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
            self._disk.fill()
        self._disk.free()


class ClockJump:
    """The wall clock of every process jumps, and stays there."""

    def __init__(self, file: Path, hours: float) -> None:
        self.name = f"clock {hours:+g} h"
        self._file = file
        self._hours = hours

    async def strike(self, run: StandInRun) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{self._hours * 3600:+.0f}\n")
        draft.replace(self._file)

    async def heal(self, run: StandInRun) -> None:
        await asyncio.sleep(2.0)  # libfaketime looks once a second


class Killed:
    """A process of the run is killed, by `how`; nothing that it had started outlives it."""

    def __init__(self, what: str, process: str, how: Callable[[int], None]) -> None:
        self.name = f"{what}: {process}"
        self._process = process
        self._how = how
        self._below: Sequence[int] = ()

    async def strike(self, run: StandInRun) -> None:
        pid = pid_of(run, self._process)
        self._below = descendants(pid)
        await asyncio.to_thread(self._how, pid)

    async def heal(self, run: StandInRun) -> None:
        if self._process == ENGINE:
            await run.kill_engine()
            await run.start_engine()

    def outlived_by(self) -> Sequence[str]:
        """What the one that was killed had started, and runs."""
        return [f"{pid}: {_command(pid)}" for pid in self._below if runs(pid)]


class KilledLauncher(Killed):
    """The same command may follow at once: it waits for the end of what the launcher has left."""

    def __init__(self, what: str, how: Callable[[int], None]) -> None:
        super().__init__(what, LAUNCHER, how)

    async def heal(self, run: StandInRun) -> None:
        async with asyncio.timeout(_END_SECONDS):
            while run.run.is_running:
                await asyncio.sleep(0.05)


ENGINE, LAUNCHER, GUARD = "engine", "launcher", "guard"
PROCESSES: dict[str, tuple[str, str]] = {
    "buffer": ("buffer", ""),
    "guard of the buffer": ("buffer", GUARD),
    "reward": ("reward", ""),
    "reward worker": ("reward", "multiprocessing.forkserver"),
    "rollout": ("rollout", ""),
    "router": ("rollout", "router"),
    "trainer": ("trainer", ""),
    "trainer rank": ("trainer", "services.trainer"),
    "guard of the trainer": ("trainer", GUARD),
}
"""The service, and a word in the command line of the process below it; "" for its own process, GUARD above it."""


def pid_of(run: StandInRun, process: str) -> int:
    """The process as it runs now."""
    if process == LAUNCHER:
        return run.run.pid
    if process == ENGINE:
        assert run.engine is not None
        return run.engine.pid
    service, word = PROCESSES[process]
    pid = run.pid(service)
    if not word:
        return pid
    if word == GUARD:
        guard = parent_of(pid)
        assert "headrace.process.guard" in _command(guard), f"{service} has no guard: it has ended"
        return guard
    below = [each for each in descendants(pid) if word in _command(each)]
    assert below, f"{service} has no {process}: {[_command(each) for each in descendants(pid)]}"
    return below[-1]


def kill_9(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
