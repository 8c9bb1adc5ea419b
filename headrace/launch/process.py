"""One service as a process: started under a guard, its output in a file, ended gracefully."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from headrace.errors import Internal
from headrace.linux import descendants

GRACE_SECONDS = 20.0
_TAIL_BYTES = 16_384


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

    def __init__(self, spec: ServiceSpec, guard: asyncio.subprocess.Process, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self._guard = guard

    @classmethod
    async def start(cls, spec: ServiceSpec) -> ServiceProcess:
        """Returns once the process exists; it is not healthy yet."""
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_file.open("ab") as log:
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
            raise Internal(f"{spec.name} could not be started:\n{tail(spec.log_file)}")
        return cls(spec, guard, int(words[1]))

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        return self._guard.returncode

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


def tail(file: Path, lines: int = 20) -> str:
    """The last lines of a log, indented; JSON log lines as they are."""
    if not file.is_file():
        return "    (no log)"
    return "\n".join(f"    {line}" for line in _end_of(file)[-lines:]) or "    (empty log)"


def _end_of(file: Path) -> list[str]:
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()


def last_words(name: str, file: Path) -> str:
    """What a service said to a person at its end: its last line that begins with its name, and those indented below."""
    lines = _end_of(file)
    starts = [i for i, line in enumerate(lines) if line.startswith(f"{name}: ")]
    if not starts:
        return tail(file)
    first, *rest = lines[starts[-1] :]
    return "\n".join([first, *takewhile(lambda line: line.startswith("  "), rest)])
