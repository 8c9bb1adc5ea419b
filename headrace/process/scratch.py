"""Folders outside of a run's own, named after it so that nothing stays: in shared memory and for temporary files.

What a service that was killed has left there goes when the next one of the same owner starts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # not for temporary files: the folder that Linux has for this
_LONGEST_FOLDER = 107 - 60
"""Linux takes 107 bytes of a socket's path, and names of folder and socket have up to 60."""


def folder_for_sockets() -> Path:
    """TMPDIR, or /tmp where that is too long for the sockets below it."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER else "/tmp")  # noqa: S108  # folders in it are 0700


def memory_folder(run: Path) -> Path:
    """The folder of a run in the machine's shared memory, the same for each of its processes; it need not exist.

    Processes of one machine give each other large things there.
    """
    return SHARED_MEMORY / f"headrace-{os.geteuid()}-{_digest(run)[:16]}"


class Scratch:
    """One temporary folder, readable by this user alone; its path is short enough for a socket in it."""

    def __init__(self, owner: Path, name: str) -> None:
        """`owner` is a folder that one service at a time has."""
        self._owner = owner
        self._called = name
        self.folder = folder_for_sockets() / f"{_prefix(owner)}{name}-{uuid.uuid4().hex[:8]}"

    def make(self) -> None:
        """Creates the folder in the place of an earlier one of this name."""
        delete_scratch(self._owner, self._called)
        self.folder.mkdir(mode=0o700)

    def delete(self) -> None:
        """Deletes the folder; repeats do nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)  # a process that is being killed may still write there


def delete_scratch(owner: Path, names: str) -> None:
    """Deletes what killed services of this owner left; only their successor may call it. `names` is a pattern."""
    for folder in folder_for_sockets().glob(f"{_prefix(owner)}{names}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(owner: Path) -> str:
    return f"headrace-{_digest(owner)[:12]}-"


def _digest(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
