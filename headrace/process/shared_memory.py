"""Folders in the machine's shared memory, in which processes of one machine give each other large things."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # not for temporary files: the folder that Linux has for this


def memory_folder(run: Path) -> Path:
    """The folder of a run, the same for each of its processes; it need not exist."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"headrace-{os.geteuid()}-{name}"
