"""Reads how much memory processes take, and how much of it this machine or its container still has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headrace.process.linux import descendants

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
