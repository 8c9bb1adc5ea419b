"""A cgroup for the processes of one program, where this process may make one: the kernel then bounds their memory.

Version 1 and version 2 of cgroups have other files for the same. A process without the right to make a group, which is
the usual case of one that is not root, has none: its caller bounds memory in another way.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.process.linux import runs

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "headrace-"
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_WITH_SWAP = ("memory.memsw.limit_in_bytes", "memory.swap.max")
_EVENTS = ("memory.oom_control", "memory.events")
_TRIAL_BYTES = 64 << 20
_TRIAL_SECONDS = 10.0
_EMPTY_SECONDS = 5.0
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group with a limit. A child process enters it with `enter`; `close` kills what is in it and removes it."""

    folder: Path
    descriptor: int

    @classmethod
    def create(cls, limit_bytes: int) -> Cgroup | None:
        """Returns None where this process may make none, or may move no process into it."""
        parent = _parent()
        with suppress(OSError):
            return cls._below(parent, limit_bytes) if parent else None
        return None

    @classmethod
    def _below(cls, parent: Path, limit_bytes: int) -> Cgroup:
        folder = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        folder.mkdir()
        try:
            limit, with_swap = _kind(folder, _LIMITS), _kind(folder, _WITH_SWAP)
            if limit is None:
                raise FileNotFoundError(f"{folder} has no memory controller")
            limit.write_text(str(limit_bytes))
            if with_swap is not None:
                with_swap.write_text("0" if with_swap.name == "memory.swap.max" else str(limit_bytes))
            return cls(folder, os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            folder.rmdir()
            raise

    def enter(self) -> None:
        """Moves the calling process; for a child between fork and exec."""
        os.write(self.descriptor, b"0")

    @property
    def has_killed(self) -> bool:
        """True when the kernel has ended a process because the group was at its limit."""
        events = _kind(self.folder, _EVENTS)
        return events is not None and any(
            line.startswith("oom_kill ") and line.split()[1] != "0" for line in events.read_text().splitlines()
        )

    def close(self) -> None:
        """Returns when its processes have ended. Removing it waits for the kernel some milliseconds."""
        os.close(self.descriptor)
        deadline = time.monotonic() + _EMPTY_SECONDS
        while time.monotonic() < deadline:
            for pid in map(int, (self.folder / "cgroup.procs").read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:  # a process of the group is about to end
                time.sleep(_POLL_SECONDS)
            else:
                return


@functools.cache
def _parent() -> Path | None:
    """The group in which this process may make others: its own, or the one around it. Tried once a process."""
    for parent in _candidates():
        _remove_stale(parent)
        with suppress(OSError, subprocess.SubprocessError):
            if not _has_memory(parent):
                (parent / "cgroup.subtree_control").write_text("+memory")
            group = Cgroup._below(parent, _TRIAL_BYTES)
            try:
                subprocess.run(["true"], preexec_fn=group.enter, timeout=_TRIAL_SECONDS, check=True)
                return parent
            finally:
                group.close()
    return None


def _candidates() -> list[Path]:
    found: list[tuple[Path, str]] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.insert(0, (_ROOT / "memory", path))
            elif not controllers:
                found.append((_ROOT, path))
    own = [(mount, mount / path.lstrip("/")) for mount, path in found]
    return [folder for mount, path in own for folder in (path, path.parent) if folder.is_relative_to(mount)]


def _has_memory(parent: Path) -> bool:
    """True where a group below has the memory controller: always in version 1."""
    control = parent / "cgroup.subtree_control"
    return not control.exists() or "memory" in control.read_text().split()


def _kind(folder: Path, names: tuple[str, str]) -> Path | None:
    """The file of version 1 or of version 2, whichever the group has."""
    return next((folder / name for name in names if (folder / name).exists()), None)


def _remove_stale(parent: Path) -> None:
    """Removes groups of processes that were killed before they could."""
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}[0-9]*-*"):
            if not runs(int(folder.name.split("-")[1])):
                folder.rmdir()
