"""One service as a process: started under a guard, its output in a file, ended gracefully."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import Internal
from headrace.launch.service_log import doing, last_error, last_words, tail
from headrace.linux import descendants

GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to start and where it will be."""

    name: str
    command: Sequence[str]
    address: str
    metrics_address: str
    log_file: Path
    start_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int | None = None
    """Within the window of the launcher's RestartPolicy; None: as many as it says."""
    no_restart: str | None = None
    """Why it is not started again when it ends badly, and what to do about it; None: it is."""


class ServiceProcess:
    """A started service. `pid` is the service's own, not its guard's."""

    def __init__(self, spec: ServiceSpec, guard: asyncio.subprocess.Process, pid: int, log_start: int) -> None:
        self.spec = spec
        self.pid = pid
        self._guard = guard
        self._log_start = log_start

    @classmethod
    async def start(cls, spec: ServiceSpec) -> ServiceProcess:
        """Returns once the process exists; it is not healthy yet."""
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_file.open("ab") as log:
            log_start = log.tell()
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.launch.guard", str(os.getpid()), str(GRACE_SECONDS)),
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **spec.environment},
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends services in order
            )
        assert guard.stdout is not None  # asked for above
        words = (await guard.stdout.readline()).decode().split()
        if len(words) != 2:
            raise Internal(f"{spec.name} could not be started:\n{tail(spec.log_file, start=log_start)}")
        return cls(spec, guard, int(words[1]), log_start)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        return self._guard.returncode

    @property
    def doing(self) -> str:
        """What it said last that it does; empty before it has said anything."""
        return doing(self.spec.log_file, self._log_start)

    @property
    def why(self) -> str:
        """Why it ended: its own last error in a sentence, else the end of its log."""
        file, start = self.spec.log_file, self._log_start
        error = self.last_error
        return f"{error}\n    (its log is {file})" if error else f"the end of {file}:\n{tail(file, start=start)}"

    @property
    def last_error(self) -> str | None:
        """The last error that it told of, in its own words."""
        return last_error(self.spec.log_file, self._log_start)

    @property
    def last_words(self) -> str:
        """What it said to a person at its end."""
        return last_words(self.spec.name, self.spec.log_file, self._log_start)

    async def wait(self) -> int:
        """Its exit code, when it and all its descendants are gone."""
        return await self._guard.wait()

    async def stop(self) -> None:
        """Asks it to end, and makes sure of it. Idempotent."""
        if self._guard.returncode is None:
            with suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._guard.wait(), GRACE_SECONDS + 10.0)
        except TimeoutError:  # the guard itself is stopped
            for pid in (*descendants(self._guard.pid), self._guard.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._guard.wait()


def meaning(code: int) -> str:
    """Of an exit code, for people."""
    return f"signal {code - 128}" if code > 128 else f"exit code {code}"
