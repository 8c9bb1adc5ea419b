"""A child process with a log file. It ends with this service, and the end of its log can be shown.

States: built → running → ended (by itself or by `stop`). The whole process group is ended, so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_LAUNCH = "services.rollout.engine.launch"
_GRACE_SECONDS = 8.0


class ChildProcess:
    """Runs one program once."""

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.log_path = log_path

    async def start(self) -> None:
        """Starts the program in a process group of its own."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _LAUNCH, str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is the group's id, too."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "start() comes first"
        return self._process.returncode

    async def wait(self) -> int:
        """Returns the exit code once the process has ended."""
        assert self._process is not None, "start() comes first"
        return await self._process.wait()

    async def stop(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Sends SIGTERM, then SIGKILL, to the whole group. Returns when it has ended."""
        if self._process is None:
            return
        if grace_seconds > 0 and self.exit_code is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_seconds)
        self._signal(signal.SIGKILL)
        await self.wait()

    def last_lines(self, count: int = 25) -> str:
        """Returns the end of the log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=count)).rstrip()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group is gone already
            os.killpg(self.pid, number)
