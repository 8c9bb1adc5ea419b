"""What each process of a job has (memory, descriptors, threads), what its folders take on the disk, and what grows."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from headrace.process.linux import descendants, resident_bytes

_ROLES = (
    ("guard", r"headrace\.process\.guard\b"),
    ("user code", r"multiprocessing\.forkserver"),
    ("router", r"sglang.?router|launch_router"),
    ("ranks' starter", r"headrace\.launch\.ranks"),
    *((name, rf"services\.{name}\b") for name in ("buffer", "reward", "rollout", "trainer")),
    ("launcher", r"headrace\.cli\.main"),
)
_MIB = 1 << 20
_BOUNDS = {"memory": (8 * _MIB, 4 * _MIB, 0.02), "disk": (8 * _MIB, 2 * _MIB, 0.05)} | {
    "descriptors": (2.0, 4.0, 0.0),
    "threads": (1.0, 2.0, 0.0),
}
"""How much a line may gain in an hour; a gain below the second, and that share of its level, is noise."""
_LEAST_POINTS = 9
_LATEST_BEGIN_SHARE = 0.6
"""Of the time: a process that began later has no verdict."""
_WARM_UP_SECONDS = 60.0
"""It has not yet done everything once."""

Points = list[tuple[float, float]]
"""(seconds, value)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the second half of a line says."""

    name: str
    quantity: str
    level: float
    gain: float
    """From its first third to its last, by their medians, which single outliers do not move."""
    grows: bool

    def __str__(self) -> str:
        size, unit = (_MIB, " MiB") if self.quantity in ("memory", "disk") else (1, "")
        numbers = f"{self.level / size:.1f}{unit}, {self.gain / size:+.2f}{unit}"
        return f"{self.name:<18}{self.quantity:<13}{numbers:<28}{'GROWS' if self.grows else 'flat'}"


class Sampling:
    """Reads /proc. A process is its role and its id: one that was started again is another line."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int, str], Points] = defaultdict(list)
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
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    handles, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
                except OSError:
                    continue  # it has ended
                if memory := resident_bytes(pid):
                    role = next((role for role, pattern in _ROLES if re.search(pattern, command)), name)
                    for quantity, value in (("memory", memory), ("descriptors", handles), ("threads", threads)):
                        self.lines[role, pid, quantity].append((now, float(value)))
        for name, folder in folders.items():
            self.lines[name, 0, "disk"].append((now, float(_bytes_on_disk(folder))))

    def verdicts(self) -> Sequence[Verdict]:
        """Of what was there for the second half of the time."""
        return [
            verdict
            for (name, _, quantity), points in sorted(self.lines.items())
            if (verdict := judge(name, quantity, points, self.seconds))
        ]


def _bytes_on_disk(folder: Path) -> int:
    """A file that goes meanwhile is left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def judge(name: str, quantity: str, points: Points, seconds: float) -> Verdict | None:
    """Only the second half counts: caches, pools and allocators fill in the first."""
    began = points[0][0]
    late = [point for point in points if point[0] >= max(seconds / 2, began + min(_WARM_UP_SECONDS, seconds / 5))]
    if len(late) < _LEAST_POINTS or began > seconds * _LATEST_BEGIN_SHARE or late[-1][0] < seconds * 0.9:
        return None
    third = len(late) // 3
    level, hours = median(value for _, value in late), (late[-1][0] - late[0][0]) * 2 / 3 / 3600
    gain = median(value for _, value in late[-third:]) - median(value for _, value in late[:third])
    an_hour, at_all, share = _BOUNDS[quantity]
    return Verdict(name, quantity, level, gain, gain > hours * an_hour and gain > at_all + share * level)
