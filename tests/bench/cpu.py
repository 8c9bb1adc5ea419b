"""CPU time of a process and of this one: what a rate cannot tell on a machine that others use, too."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Of this process and another, user and system, so far."""
    return time.process_time() + cpu_seconds_of(pid)


def cpu_seconds_of(pid: int) -> float:
    """Of another process, user and system, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
