"""Tells a process's forks from programs that it started."""

from __future__ import annotations

from pathlib import Path

import psutil


def forks_below(pid: int) -> list[str]:
    """The names of its descendants that were forked: the kernel put their C library where their parent's is."""
    below = psutil.Process(pid).children(recursive=True)
    return sorted(each.name() for each in below if _libc_at(each.pid) == _libc_at(each.ppid()))


def _libc_at(pid: int) -> str:
    """Random in each new program, unchanged in a fork."""
    return next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/libc.so" in line)
