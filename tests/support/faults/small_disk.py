"""A small file system that a test fills and frees: tmpfs, in the namespace of the process that mounts it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_FILLER = ".filler"
_CHUNK = 64 << 10


def in_own_namespace(command: list[str]) -> list[str]:
    """The command, in a mount namespace in which it may mount; what it mounts is gone when it ends."""
    return [*_UNSHARE, *command]


class SmallDisk:
    """`folder` becomes a file system of so many MiB."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], check=True)
        self.folder = folder

    def fill(self, left_bytes: int = 0) -> None:
        """So that this many bytes are left, or hardly more."""
        with (self.folder / _FILLER).open("ab", buffering=0) as filler:
            for size in (_CHUNK, 4096):
                while self.free_bytes > left_bytes:
                    try:
                        filler.write(bytes(size))
                    except OSError:
                        break

    def free(self) -> None:
        """Space returns."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


_UNSHARE = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
