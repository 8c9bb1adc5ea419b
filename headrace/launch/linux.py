"""Three things of Linux that keep process trees whole: parent-death signals, subreapers, and who descends from whom."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """This process gets the signal when `parent` ends; ends now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Every live process below `pid`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent_of(entry), []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:
        found.extend(children.get(each, []))
    return found


def _parent_of(entry: Path) -> int:
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return 0  # it ended while we looked
    return int(stat.rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
