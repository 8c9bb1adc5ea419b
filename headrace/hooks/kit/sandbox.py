"""Python that the policy has written, run apart: no network, files to read only, limits of time, memory and output.

With bubblewrap (`bwrap`) the code sees the interpreter, its packages and an empty /tmp, and nothing else. Without it,
or where nobody may make namespaces, it is a process with limits that can read what this one can, and reach what this
one can: `sandbox_of` says which of the two a machine has.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import InvalidArgument
from headrace.hooks.load import load_hook
from headrace.process.linux import marked, threads_of_user

Sandbox = Literal["bubblewrap", "process"]

_SECONDS = 5.0
_MEMORY_BYTES = 512 << 20
_MAX_CHARACTERS = 4_000
_MOST_CODE_BYTES = 1 << 20
_FILE_BYTES = 32 << 20
_PROCESSES = 64
_READ_BYTES = 64 << 10
_MARK = "HEADRACE_SANDBOX"
_TRIAL_SECONDS = 10.0
_TMP = "/tmp"  # noqa: S108  # the sandbox's own
_LIMITED = """
import os, resource, sys
names = ("CPU", "AS", "FSIZE", "NPROC", "CORE")
for name, limit in zip(names, map(int, sys.argv[1:6])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
os.execv(sys.argv[6], sys.argv[6:])
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """The output, standard errors behind it, and how it ended: `exit_code` is None for what ran out of time."""

    output: str
    exit_code: int | None

    def __str__(self) -> str:
        return self.output


async def run_python(
    code: str,
    *,
    stdin: str = "",
    seconds: float = _SECONDS,
    memory_bytes: int = _MEMORY_BYTES,
    max_characters: int = _MAX_CHARACTERS,
) -> Ran:
    """Runs the code as a program, in a sandbox of its own; nothing of it is left when it returns.

    `seconds` bounds the time it takes and, apart from that, the processor time of each of its processes. What it writes
    beyond `max_characters` is cut, and its output says so. Raises InvalidArgument for code of more than 1 MiB.
    """
    if len(code.encode(errors="replace")) > _MOST_CODE_BYTES:
        raise InvalidArgument(f"the code has {len(code)} characters, it may have {_MOST_CODE_BYTES} bytes")
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="headrace-sandbox-") as folder:
        program = Path(folder) / "program.py"
        program.write_text(code, errors="replace")
        is_apart = sandbox_of() == "bubblewrap"
        # A user namespace counts its own processes; without one, all that the user runs is counted.
        processes = _PROCESSES + (0 if is_apart else await asyncio.to_thread(threads_of_user))
        limits = (max(1, round(seconds)), memory_bytes, _FILE_BYTES, processes, 0)
        inner = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _LIMITED,
            *map(str, limits),
            sys.executable,
            "-I",
            "-B",
            str(program),
        ]
        process = await asyncio.create_subprocess_exec(
            *(_bubblewrapped(folder) if is_apart else ()),
            *inner,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "HOME": _TMP, "LANG": "C.UTF-8", _MARK: mark},
            cwd=folder,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                written = await _spoken(process, stdin, 4 * max_characters)
                exit_code = await process.wait()
        except TimeoutError:
            return Ran(f"error: it ran longer than {seconds:g} s", None)
        finally:
            await asyncio.shield(asyncio.to_thread(_end, process.pid, mark))
            await process.wait()
    return Ran(_cut(written.decode(errors="replace"), max_characters), exit_code)


@functools.cache
def sandbox_of() -> Sandbox:
    """The sandbox that this machine has; tried once a process."""
    if shutil.which("bwrap") is None:
        return "process"
    with tempfile.TemporaryDirectory(prefix="headrace-sandbox-") as folder:
        trial = [*_bubblewrapped(folder), sys.executable, "-I", "-c", "print(6 * 7)"]
        try:
            ended = subprocess.run(trial, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return "process"
    return "bubblewrap" if ended.stdout.strip() == b"42" else "process"


def sandbox_used_by(path: str) -> str | None:
    """Says what the programs of a user's function run in; None when its file names no `run_python`."""
    if "run_python" not in load_hook(path).file.read_text(errors="replace"):
        return None
    if sandbox_of() == "bubblewrap":
        return "bubblewrap: no network, and nothing of this machine's files"
    return "a process with limits; install bubblewrap (bwrap) to keep it from the network and from files"


def _bubblewrapped(folder: str) -> Sequence[str]:
    """The command in front of the program's: namespaces of its own, and what is seen in them."""
    seen = ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(Path(sys.executable).parent))
    return (
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", _TMP),
        *(word for path in dict.fromkeys(seen) for word in ("--ro-bind-try", path, path)),
        *("--ro-bind", folder, folder, "--chdir", _TMP, "--"),
    )


async def _spoken(process: asyncio.subprocess.Process, stdin: str, most_bytes: int) -> bytes:
    """Its output, as far as somebody reads it; the rest is read and dropped, so that it is not held up."""
    assert process.stdin is not None
    assert process.stdout is not None
    sending = asyncio.create_task(_send(process.stdin, stdin))
    written = bytearray()
    try:
        while part := await process.stdout.read(_READ_BYTES):
            written += part[: max(0, most_bytes + 1 - len(written))]
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return bytes(written)


async def _send(to: asyncio.StreamWriter, text: str) -> None:
    with suppress(ConnectionError):  # it does not read
        to.write(text.encode(errors="replace"))
        await to.drain()
        to.close()


def _end(pid: int, mark: str) -> None:
    """Kills the program, and whatever it has started: all of it carries the mark in its environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    while left := marked(_MARK, mark):
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n… cut: more than {most} characters"
