"""Starts a process, ties its life to its starter's, and ends it: a service, an engine, or a program of one answer.

`Child` runs under a guard with its output in a log file; nothing that it started outlives it, and nothing outlives its
starter, even if that is killed: see `guard`. States: built → started → ended (by itself or by `stop`).
`OneShot` has its input on stdin, its answer on stdout and lines for people on stderr. States: running → ended, by
itself, at its deadline or by `kill`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.errors import Internal
from headrace.process.exit_status import of_shell
from headrace.process.guard import SWEEP_NOW, guard_command
from headrace.process.linux import descendants, of_tree, runs
from headrace.process.log_file import last_lines, open_log, tail

Stream = TypeVar("Stream", asyncio.StreamReader, asyncio.StreamWriter)

LOOK_SECONDS = 5.0
"""How often a starter looks at the memory of what it has started."""
_NUM_LOOKS = 6
"""Half a minute: a service that lost a process has ended by then."""
_SWEEP_SECONDS = 10.0
_POLL_SECONDS = 0.02
_LAST_LINES = 8
_MAX_LINE_BYTES = 64 << 20


class Child:
    """Runs one command once.

    `orphan_seconds` is how long it may take to end when its starter was killed. With `asks_group`, a stop sends SIGTERM
    to its whole group, for a program that does not pass the signal on. `descriptors` are passed on under their numbers.
    It works in `folder`, reads `stdin`, and has the `environment` alone unless it inherits this process's.
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
        inherits: bool = True,
        folder: Path | None = None,
        stdin: Path = Path(os.devnull),
    ) -> None:
        self.log_file = log_file
        self.log_start = 0
        """The byte of the log at which this start's output begins."""
        self._command = command
        self._environment = {**(os.environ if inherits else {}), **environment}
        self._folder = folder
        self._stdin = stdin
        self._orphan_seconds = orphan_seconds
        self._asks_group = asks_group
        self._descriptors = descriptors
        self._guard: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._memory: ResidentMemory | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the process exists."""
        with open_log(self.log_file) as log, self._stdin.open("rb") as stdin:
            self.log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                *guard_command(self._orphan_seconds, self._command),
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C reaches the starter alone, which ends its processes in order
            )
        words = (await _pipe(self._guard.stdout).readline()).decode().split()
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
        return None if code is None else of_shell(code)

    @property
    def resident_bytes(self) -> int | None:
        """The most memory that it and those below it had in the last half minute; None before the first look."""
        return self._memory.most if self._memory else None

    async def wait(self) -> int:
        """Returns its exit code when it and all its descendants have ended."""
        code = await self._running.wait()
        while code < 0 and runs(self.pid):  # the kernel kills it with its guard, and clears up
            await asyncio.sleep(_POLL_SECONDS)
        return of_shell(code)

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


class ResidentMemory:
    """The memory of a process and those below it, looked at while it runs.

    The kernel says to nobody that it ended a process because memory ran out. The very last look says little: of a tree
    that lost its largest process and has not ended yet, it is what is left.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks: deque[int] = deque(maxlen=_NUM_LOOKS)

    @property
    def most(self) -> int | None:
        """Bytes in the last half minute; None before the first look."""
        return max(self._looks, default=None)

    async def watch(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Returns when `wait` does."""
        ended = asyncio.ensure_future(wait())
        try:
            while not ended.done():
                if resident := await asyncio.to_thread(of_tree, self._pid, sys.maxsize):
                    self._looks.append(resident)
                await asyncio.wait([ended], timeout=LOOK_SECONDS)
        finally:
            ended.cancel()


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a process that has ended; `last_lines` are those of stderr that `takes` did not consume."""

    exit_code: int
    out: bytes
    last_lines: Sequence[str]


class OneShot:
    """One process. Its starter awaits `result` or calls `kill`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> OneShot:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, limit=_MAX_LINE_BYTES
            )
        )

    async def result(
        self, data: bytes = b"", *, seconds: float | None, takes: Callable[[str], bool] = lambda _: False
    ) -> Finished:
        """Sends `data` and waits for the end. `takes` sees each line of stderr, and returns True for one it consumes.

        The process is killed when the time is over (TimeoutError), and when the waiting task is cancelled.
        """
        try:
            async with asyncio.timeout(seconds):
                out, lines, _ = await asyncio.gather(
                    _pipe(self._process.stdout).read(), self._last_lines(takes), self._send(data)
                )
                return Finished(await self._process.wait(), out, lines)
        finally:
            self.kill()

    async def _last_lines(self, takes: Callable[[str], bool]) -> Sequence[str]:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        async for line in _pipe(self._process.stderr):
            text = line.decode(errors="replace").removesuffix("\n")
            if not takes(text):
                last.append(text)
        return tuple(last)

    async def _send(self, data: bytes) -> None:
        stdin = _pipe(self._process.stdin)
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its last lines say why
            stdin.write(data)
            await stdin.drain()
        stdin.close()

    def kill(self) -> None:
        """Ends the process if it still runs."""
        if self._process.returncode is None:
            self._process.kill()


async def run_once(command: Sequence[str], environment: Mapping[str, str], *, seconds: float | None = None) -> Finished:
    """Starts the command and waits for its end. Raises TimeoutError, and kills it, when the time is over."""
    return await (await OneShot.start(command, environment)).result(seconds=seconds)


def _pipe(stream: Stream | None) -> Stream:
    assert stream is not None, "it was started with a pipe for this stream"
    return stream
