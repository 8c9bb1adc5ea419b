"""A short-lived process that does one thing: its input on stdin, its answer on stdout, lines for people on stderr.

States: running → ended, by itself, at its deadline or by `kill`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import Internal

Stream = TypeVar("Stream", asyncio.StreamReader, asyncio.StreamWriter)

_LAST_LINES = 8


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
        """Starts the command with this environment and no other."""
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
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
                    pipe_of(self._process.stdout).read(), self._last_lines(takes), self._send(data)
                )
                return Finished(await self._process.wait(), out, lines)
        finally:
            self.kill()

    async def _last_lines(self, takes: Callable[[str], bool]) -> Sequence[str]:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        async for line in _lines_of(pipe_of(self._process.stderr)):
            if not takes(line):
                last.append(line)
        return tuple(last)

    async def _send(self, data: bytes) -> None:
        stdin = pipe_of(self._process.stdin)
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


def pipe_of(stream: Stream | None) -> Stream:
    """The stream of a process that was started with a pipe for it."""
    if stream is None:
        raise Internal("the process was started without a pipe for this stream")
    return stream


async def _lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length, without their ends."""
    rest = b""
    while piece := await stream.read(1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
