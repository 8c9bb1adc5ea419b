"""A process under a guard, with its output in a log file: services, engines and routers are started in this way.

States: built → started → ended (by itself or by `stop`). Nothing that it started outlives it, and nothing outlives its
starter, even if that is killed: see `guard`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.errors import Internal
from headrace.process.ended import ResidentMemory
from headrace.process.guard import SWEEP_NOW, guard_command
from headrace.process.linux import descendants, runs
from headrace.process.log_file import last_lines, open_log, tail
from headrace.process.one_shot import pipe_of

_SWEEP_SECONDS = 10.0
_POLL_SECONDS = 0.02


class GuardedProcess:
    """Runs one command once.

    `orphan_seconds` is how long it may take to end when its starter was killed. With `asks_group`, a stop sends SIGTERM
    to its whole group, for a program that does not pass the signal on. `descriptors` are passed on under their numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str],
        *,
        orphan_seconds: float = 0.0,
        asks_group: bool = False,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._asks_group = asks_group
        self._descriptors = descriptors
        self.log_file = log_file
        self.log_start = 0
        """The byte of the log at which this start's output begins."""
        self._command = command
        self._environment = environment
        self._orphan_seconds = orphan_seconds
        self._guard: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._memory: ResidentMemory | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the process exists."""
        with open_log(self.log_file) as log:
            self.log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                *guard_command(self._orphan_seconds, self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._environment},
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C reaches the starter alone, which ends its processes in order
            )
        words = (await pipe_of(self._guard.stdout).readline()).decode().split()
        if len(words) != 2:
            await self._guard.wait()
            raise Internal(f"{self._command[0]} could not be started:\n{tail(self.log_file, start=self.log_start)}")
        self._pid = int(words[1])
        self._memory = ResidentMemory(self._pid)
        self._looking = asyncio.create_task(self._memory.watch(self._guard.wait))

    @property
    def pid(self) -> int:
        """The process's own id, not its guard's; also the id of its group."""
        if self._pid is None:
            raise Internal(f"{self._command[0]} has no id: start() comes first")
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """None while anything of it runs; 128 + n when signal n ended it."""
        code = self._running.returncode
        return None if code is None else _as_told(code)

    @property
    def resident_bytes(self) -> int | None:
        """The most memory that it and those below it had in the last half minute; None before the first look."""
        return self._memory.most if self._memory else None

    async def wait(self) -> int:
        """Returns its exit code when it and all its descendants have ended."""
        code = await self._running.wait()
        while code < 0 and runs(self.pid):  # the kernel kills it with its guard, and clears up
            await asyncio.sleep(_POLL_SECONDS)
        return _as_told(code)

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._guard is None:
            raise Internal(f"{self._command[0]} does not run: start() comes first")
        return self._guard

    async def stop(self, grace_seconds: float) -> None:
        """Asks it to end, and kills it and all its descendants after the grace period. Idempotent."""
        if self._guard is None:
            return
        if self._asks_group and grace_seconds > 0 and self._pid is not None and self._guard.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)
        polite = [(signal.SIGTERM, grace_seconds)] if grace_seconds > 0 else []
        for number, patience in (*polite, (SWEEP_NOW, _SWEEP_SECONDS)):
            if self._guard.returncode is None:
                with suppress(ProcessLookupError):
                    self._guard.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._guard.wait(), patience)
                return
        for pid in (*descendants(self._guard.pid), self._guard.pid):  # the guard itself is stopped
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._guard.wait()

    def last_lines(self, count: int = 25) -> str:
        """Returns the end of what this start wrote."""
        return "\n".join(last_lines(self.log_file, count, self.log_start))


def _as_told(code: int) -> int:
    """The guard tells of its command in this way; a signal that ended the guard itself ended the command, too."""
    return 128 - code if code < 0 else code
