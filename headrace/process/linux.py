"""What Linux knows of processes: whose children they are, who ends with whom, and how much memory they take."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _CPU_TIMES, _START_TIME = 0, slice(11, 13), 19
"""Their places among the fields of /proc/PID/stat behind the name."""
_TICKS = os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Makes the kernel signal this process when `parent` ends; exits now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`; none below one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def kill_descendants() -> None:
    """Kills every process below this one, and adopts and kills those that are orphaned by it."""
    adopt_orphans()
    while running := [pid for pid in descendants(os.getpid()) if runs(pid)]:
        for pid in running:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Direct children that run, with adopted orphans.

    Asked after each call of user code: psutil reads all of /proc, which takes twenty times as long.
    """
    found: set[int] = set()
    with suppress(OSError):  # it ended while we looked
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return sorted(child for child in found if runs(child))


def runs(pid: int) -> bool:
    """True when the process exists and is not a zombie."""
    stat = _stat(pid)
    return bool(stat) and stat[_STATE] not in "ZX"


def wants_a_core(pid: int, seconds: float) -> bool:
    """True for a process that would run, and to which a busy machine has given less of a core than these `seconds`.

    And for one that has ended.
    """
    stat = _stat(pid)
    return not stat or (stat[_STATE] in "RD" and sum(map(int, stat[_CPU_TIMES])) / _TICKS < seconds)


def identity_of(pid: int) -> str | None:
    """Tells a process from another one that has its number later, also after a restart of the machine.

    None for a process that has ended.
    """
    stat = _stat(pid)
    if not stat:
        return None
    boot = ""
    with suppress(OSError):  # a sandbox may hide it
        boot = _BOOT.read_text().strip()
    return f"{boot} {stat[_START_TIME]}"


def marked(name: str, value: str) -> list[int]:
    """Processes that were started with this variable in their environment, or forked from one that was."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it ended while we looked, or is another user's
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def threads_of_user() -> int:
    """Threads of this user's processes, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it ended while we looked
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(entry / "task"))
    return count


def first_to_go() -> None:
    """Makes the kernel choose this process and its children first when memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; none for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# How much memory processes take, and how much of it this machine or its container still has.


_KIB = 1024


def of_tree(pid: int, enough: int = 0) -> int:
    """`bytes_of_tree` of a process and those below it."""
    return bytes_of_tree((pid, *descendants(pid)), enough)


def bytes_of_tree(pids: Sequence[int], enough: int) -> int:
    """Returns the bytes of processes, in memory and swapped out; what they share counts once.

    Up to `enough` it may count for each, which is read faster.
    """
    resident = {pid: resident_bytes(pid) + _swapped_bytes(pid) for pid in pids}
    if (total := sum(resident.values())) <= enough:
        return total
    # One that forbids the look at what it shares counts in full.
    return sum(_proportional(pid) + _swapped_bytes(pid) or each for pid, each in resident.items())


def resident_bytes(pid: int) -> int:
    """Returns the bytes of a process that are in memory, with what it shares; 0 when it has ended."""
    try:
        return _field(Path(f"/proc/{pid}/status"), "VmRSS") * _KIB
    except OSError:
        return 0


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that new processes may take: what the machine has, or the container where that is less."""
    free = _field(proc / "meminfo", "MemAvailable") * _KIB
    with suppress(OSError, ValueError):  # there is no such file, or "max" in it: no limit
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _field(cgroup / "memory.stat", "inactive_file")
        free = min(free, max(limit - used, 0))
    return free


def _swapped_bytes(pid: int) -> int:
    try:
        return _field(Path(f"/proc/{pid}/status"), "VmSwap") * _KIB
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss") * _KIB
    except OSError:  # it ended meanwhile
        return 0


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0].removesuffix(":") == name:
            return int(words[1])
    return 0
