"""Python that the policy has written, run apart: no network, files to read only, limits of time, memory and output.

With bubblewrap (`bwrap`) the code sees the interpreter, its packages and an empty /tmp, and nothing else. Without it,
or where nobody may make namespaces, it is a process with limits that can read what this one can, and reach what this
one can: `sandbox_of` says which of the two a machine has.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import secrets
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
_EMPTY_SECONDS = 5.0
_TMP = "/tmp"  # noqa: S108  # the sandbox's own
_UNPRIVILEGED = ("--unshare-all",)
_OF_ROOT = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
)
_FIRST_USER = 1 << 30
_USERS = 1 << 29
_LIMITED = """
import os, resource, sys
os.write(int(sys.argv[7]), b"1")
os.close(int(sys.argv[7]))
if uid := int(sys.argv[8]):
    for path in (sys.argv[6], os.path.realpath(sys.argv[6]), sys.argv[-1]):
        while (path := os.path.dirname(path)) != "/":
            try:
                os.chmod(path, 0o755)
            except OSError:
                pass
    os.chmod("/tmp", 0o1777)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
del sys.argv[7:9]
names = ("CPU", "AS", "FSIZE", "NPROC", "CORE")
for name, limit in zip(names, map(int, sys.argv[1:6])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
os.execv(sys.argv[6], sys.argv[6:])
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """The output, standard errors behind it, and how it ended: `exit_code` is None for what ran out of time.

    `started` is False where the sandbox itself failed: the output says why, and nothing of the program has run.
    """

    output: str
    exit_code: int | None
    started: bool = True

    def __str__(self) -> str:
        return self.output


async def run_python(
    code: str,
    *,
    stdin: str = "",
    seconds: float = _SECONDS,
    cpu_seconds: float | None = None,
    with_errors: bool = True,
    memory_bytes: int = _MEMORY_BYTES,
    max_characters: int = _MAX_CHARACTERS,
) -> Ran:
    """Runs the code as a program, in a sandbox of its own; nothing of it is left when it returns.

    `seconds` bounds the time it takes, `cpu_seconds` the processor time of each of its processes (absent: more).
    What it writes beyond `max_characters` is cut, and its output says so; its standard errors are part of it
    `with_errors`. Raises InvalidArgument for code of more than 1 MiB.
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
        limits = (math.ceil(cpu_seconds or seconds + 1.0), memory_bytes, _FILE_BYTES, processes, 0)
        begun, begins = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(_bubblewrapped(folder) if is_apart else ()),
                *(sys.executable, "-I", "-S", "-c", _LIMITED, *map(str, limits), sys.executable, str(begins)),
                *(str(_new_user(folder) if is_apart else 0), "-I", "-B", str(program)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT if with_errors else asyncio.subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "HOME": _TMP, "LANG": "C.UTF-8", _MARK: mark},
                cwd=folder,
                start_new_session=True,
                pass_fds=(begins,),
            )
            os.set_blocking(begun, False)
            try:
                async with asyncio.timeout(seconds):
                    written = await _spoken(process, stdin, 4 * max_characters)
                    exit_code = await process.wait()
            except TimeoutError:
                return Ran(f"error: it ran longer than {seconds:g} s", None, _has_begun(begun))
            finally:
                await asyncio.shield(asyncio.to_thread(_end, process.pid, mark))
                await _emptied(process)
            return Ran(_cut(written.decode(errors="replace"), max_characters), exit_code, _has_begun(begun))
        finally:
            os.close(begun)
            os.close(begins)


@functools.cache
def sandbox_of() -> Sandbox:
    """The sandbox that this machine has; tried once a process."""
    if shutil.which("bwrap") is None:
        return "process"
    return "bubblewrap" if leaves_root() or _works(_UNPRIVILEGED) else "process"


@functools.cache
def leaves_root() -> bool:
    """True where programs of root get a user of their own, one each: the kernel lets root have any number of processes.

    Tried once a process.
    """
    return os.getuid() == 0 and _works(_OF_ROOT)


def _works(namespaces: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="headrace-sandbox-") as folder:
        trial = [*_bubblewrapped(folder, namespaces), sys.executable, "-I", "-c", "print(6 * 7)"]
        try:
            ended = subprocess.run(trial, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
    return ended.stdout.strip() == b"42"


def _new_user(folder: str) -> int:
    """Returns the id of a user that nobody else is, or 0 for this process's own."""
    if not leaves_root():
        return 0
    os.chmod(folder, 0o755)  # noqa: S103  # the program is what its user reads
    return _FIRST_USER + secrets.randbelow(_USERS)


def sandbox_used_by(path: str) -> str | None:
    """Says what the programs of a user's function run in; None when its file names no `run_python`."""
    return sandbox_said() if "run_python" in load_hook(path).file.read_text(errors="replace") else None


def sandbox_said() -> str:
    """Describes the sandbox of this machine."""
    if sandbox_of() == "bubblewrap":
        return "bubblewrap: no network, and nothing of this machine's files"
    return "a process with limits; install bubblewrap (bwrap) to keep it from the network and from files"


def _has_begun(begun: int) -> bool:
    try:
        return os.read(begun, 1) == b"1"
    except BlockingIOError:
        return False


def _bubblewrapped(folder: str, namespaces: Sequence[str] | None = None) -> Sequence[str]:
    """The command in front of the program's: namespaces of its own, and what is seen in them."""
    seen = ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(Path(sys.executable).parent))
    return (
        *("bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(namespaces or (_OF_ROOT if leaves_root() else _UNPRIVILEGED)),
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


async def _emptied(process: asyncio.subprocess.Process) -> None:
    """Reads what an ended program has left, without which it is not waited for. One that escaped may hold its pipe."""
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(_EMPTY_SECONDS):
            while await process.stdout.read(_READ_BYTES):
                pass
            await process.wait()


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
