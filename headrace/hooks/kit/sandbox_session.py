"""Sandboxes with a session: a folder that stays while a sample is made, in which commands run and files are edited.

In: a kind (bubblewrap, podman, docker, or one that a package provides) and the first files. Out: `SandboxSession`.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.hooks.kit.sandbox import Limits, SandboxResult, WorkFolder
from headrace.limits import did_you_mean

ENTRY_POINTS = "headrace.sandboxes"
"""The group of packages' own kinds: a name, and `f(files, **options)` as `open_sandbox` opens them."""
_DEFAULTS = Limits()
_FILE_CHARACTERS = 1 << 20
_FILE_SECONDS = 10.0
_START_SECONDS = 120.0
_LATE_SECONDS = 5.0
_PROCESSES, _CPUS = 64, 1


class SandboxSession(ABC):
    """Runs commands and edits files. Paths are within the session's folder, where each command begins.

    A command ends with all that it started: only files stay for the next one.
    """

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        seconds: float = _DEFAULTS.seconds,
        max_characters: int = _DEFAULTS.max_characters,
    ) -> SandboxResult:
        """Runs a line of a shell, or a program with its arguments; the output has standard errors in it.

        What fails, or runs too long, is a result. Raises Unavailable where the sandbox itself fails.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        limits = Limits(seconds=seconds, max_characters=max_characters)
        return await self._started(words, limits, stdin=stdin, with_errors=True)

    async def read(self, path: str) -> str:
        """Raises NotFound where there is no such file, InvalidArgument for one of more than 1 MiB."""
        limits = Limits(seconds=_FILE_SECONDS, max_characters=_FILE_CHARACTERS)
        result = await self._started(["cat", "--", path], limits, stdin="", with_errors=False)
        if result.exit_code != 0:
            raise NotFound(f"the sandbox has no file {path!r} that can be read")
        if len(result.output) > _FILE_CHARACTERS:
            raise InvalidArgument(f"file {path!r} of the sandbox has more than {_FILE_CHARACTERS} characters")
        return result.output

    async def write(self, path: str, text: str) -> None:
        """Writes a file whole, and the folders above it. Raises InvalidArgument where that cannot be."""
        line = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
        limits = Limits(seconds=_FILE_SECONDS)
        result = await self._started(["/bin/sh", "-c", line, "sh", path], limits, stdin=text, with_errors=True)
        if result.exit_code != 0:
            raise InvalidArgument(f"file {path!r} of the sandbox cannot be written: {result.output.strip()[:200]}")

    async def _started(self, command: Sequence[str], limits: Limits, *, stdin: str, with_errors: bool) -> SandboxResult:
        result = await self.run(command, limits, stdin=stdin, with_errors=with_errors)
        if not result.started:
            raise Unavailable(f"the sandbox did not start: {result.output.strip()[:300] or 'no output'}")
        return result

    @abstractmethod
    async def run(self, command: Sequence[str], limits: Limits, *, stdin: str, with_errors: bool) -> SandboxResult:
        """Runs one program; what a kind of sandbox implements, beside `close`."""

    @abstractmethod
    async def close(self) -> None:
        """Ends what runs, and deletes the folder."""


@asynccontextmanager
async def open_sandbox(
    kind: str = "bubblewrap", *, files: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[SandboxSession]:
    """A session that is closed with the block: `async with open_sandbox(files={"a.py": "print(1)"}) as box`.

    `bubblewrap`: this machine's programs, no network, the limits of `run_python`. `podman` and `docker`, with `image=`:
    a container without network. Other kinds are entry points of the group `headrace.sandboxes`. Raises InvalidArgument
    for an unknown kind, FailedPrecondition where this machine does not have it, Unavailable when it does not start.
    """
    opened = _KINDS.get(kind) or _provided(kind)
    async with opened(dict(files or {}), **options) as session:
        yield session


Opened = Callable[..., AbstractAsyncContextManager[SandboxSession]]


def _provided(kind: str) -> Opened:
    provided = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if kind not in provided:
        known = [*_KINDS, *provided]
        raise InvalidArgument(f"no sandbox {kind!r}{did_you_mean(kind, known)}; there are {', '.join(known)}")
    opened: Opened = provided[kind].load()
    return opened


class _Bubblewrap(SandboxSession):
    def __init__(self, folder: WorkFolder) -> None:
        self._folder = folder

    async def run(self, command: Sequence[str], limits: Limits, *, stdin: str, with_errors: bool) -> SandboxResult:
        return await self._folder.run(command, limits, stdin=stdin, with_errors=with_errors)

    async def close(self) -> None:
        await asyncio.to_thread(self._folder.close)


@asynccontextmanager
async def _bubblewrap(files: Mapping[str, str]) -> AsyncIterator[SandboxSession]:
    session = _Bubblewrap(folder := await asyncio.to_thread(WorkFolder))
    try:
        for path, text in files.items():
            folder.put(path, text)
        yield session
    finally:
        await session.close()


class _Container(SandboxSession):
    """A container that sleeps; each command is an `exec` in it."""

    def __init__(self, engine: str, name: str) -> None:
        self._engine = engine
        self._name = name

    async def run(self, command: Sequence[str], limits: Limits, *, stdin: str, with_errors: bool) -> SandboxResult:
        """The program `timeout` of the image ends what runs too long: the engine's own client leaves it running."""
        bounded = ("timeout", "-s", "KILL", f"{limits.seconds:g}", *command)
        code, output = await _asked(
            (self._engine, "exec", "-i", self._name, *bounded),
            stdin,
            limits.seconds + _LATE_SECONDS,
            4 * limits.max_characters,
            with_errors=with_errors,
        )
        if code in (None, 137):
            return SandboxResult(f"error: it ran longer than {limits.seconds:g} s, or took too much memory", None)
        is_cut = len(output) > limits.max_characters
        shown = output[: limits.max_characters] + f"\n… cut: more than {limits.max_characters} characters" * is_cut
        return SandboxResult(shown, code)

    async def close(self) -> None:
        await _asked((self._engine, "rm", "-f", self._name), "", _START_SECONDS, _FILE_CHARACTERS, with_errors=True)


@asynccontextmanager
async def _container(engine: str, files: Mapping[str, str], *, image: str) -> AsyncIterator[SandboxSession]:
    if shutil.which(engine) is None:
        raise FailedPrecondition(f"this machine has no {engine}: install it, or choose the sandbox bubblewrap")
    name = f"headrace-{uuid.uuid4().hex}"
    limits = (
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--memory", str(_DEFAULTS.memory_bytes), "--pids-limit", str(_PROCESSES), "--cpus", str(_CPUS)),
    )
    session = _Container(engine, name)
    try:
        command = (engine, "run", "-d", "--rm", "--name", name, *limits, "-w", "/sandbox", image, "sleep", "infinity")
        code, said = await _asked(command, "", _START_SECONDS, _FILE_CHARACTERS, with_errors=True)
        if code != 0:
            raise Unavailable(f"{engine} did not start {image}: {said.strip()[-300:] or 'no output'}")
        for path, text in files.items():
            await session.write(path, text)
        yield session
    finally:
        await session.close()


async def _asked(
    command: Sequence[str], stdin: str, seconds: float, most: int, *, with_errors: bool
) -> tuple[int | None, str]:
    """Its exit code, None for what ran out of time, and at most `most` bytes of its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if with_errors else asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate(stdin.encode(errors="replace"))
    except TimeoutError:
        return None, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output[:most].decode(errors="replace")


_KINDS: Mapping[str, Opened] = {
    "bubblewrap": _bubblewrap,
    "podman": partial(_container, "podman"),
    "docker": partial(_container, "docker"),
}
