"""What each process of a job has: memory, file descriptors, threads; and what its folder takes on the disk."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.process.linux import descendants
from headrace.process.memory import resident_bytes

QUANTITIES = ("memory", "descriptors", "threads")
_ROLES = (
    ("guard", r"headrace\.process\.guard\b"),
    ("user code", r"multiprocessing\.forkserver"),
    ("router", r"sglang.?router|launch_router"),
    ("ranks' starter", r"headrace\.launch\.ranks"),
    *((name, rf"services\.{name}\b") for name in ("buffer", "reward", "rollout", "trainer")),
    ("engine", r"fakes\.gloo_engine|sglang\.launch_server|engine\.server|sglang::"),
    ("launcher", r"headrace\.cli\.main"),
)


@dataclass
class Lines:
    """(seconds, value) by quantity, of one process or one folder."""

    points: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


class Sampling:
    """Reads /proc. A process is its role and its id: one that was started again is another line."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], Lines] = defaultdict(Lines)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def look(self, roots: Mapping[str, int], folders: Mapping[str, Path]) -> None:
        """Adds a point for each process below `roots` (name → id), themselves included, and for each folder."""
        now = self.seconds
        for name, root in roots.items():
            for pid in (root, *descendants(root)):
                if found := _of_process(pid):
                    points = self.lines[role_of(pid) or name, pid].points
                    for quantity, value in zip(QUANTITIES, found, strict=True):
                        points[quantity].append((now, value))
        for name, folder in folders.items():
            self.lines[name, 0].points["disk"].append((now, float(sum(_sizes(folder)))))


def role_of(pid: int) -> str | None:
    """What a process is, by its command line; None for one that this does not know."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return next((name for name, pattern in _ROLES if re.search(pattern, command)), None)


def _of_process(pid: int) -> tuple[float, float, float] | None:
    """None when it has ended."""
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    memory = resident_bytes(pid)
    return (float(memory), float(descriptors), float(threads)) if memory else None


def _sizes(folder: Path) -> Iterator[int]:
    """Blocks on the disk of each file; one that goes meanwhile is left out."""
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
