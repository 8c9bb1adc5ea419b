"""Files that fail at a named point: `NAME:ACTION:N` acts at the N-th time the point is passed.

Points: create, created, write, half-written, written, synced, sync, sync-folder, delete.
Actions: kill (as kill -9 does), EIO, ENOSPC, pause (half a second, once).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.support.faults.failpoint import Failpoint
from tests.support.faults.told_files import ToldFiles

POINTS = (
    "create", "created", "write", "half-written", "written", "sync", "synced", "sync-folder", "delete",
)  # fmt: skip
ACTIONS = ("kill", "EIO", "ENOSPC", "pause")


class FaultyFiles(ToldFiles):
    """Real files, and one fault."""

    def __init__(self, folder: Path, failpoint: str) -> None:
        super().__init__(folder, self._pass)
        self._failpoint = Failpoint(failpoint)
        assert self._failpoint.point in POINTS, failpoint
        assert self._failpoint.action in ACTIONS, failpoint

    def sync(self, name: str) -> None:
        self._pass("sync")
        super().sync(name)

    def sync_folder(self) -> None:
        self._pass("sync-folder")
        super().sync_folder()

    def _pass(self, point: str) -> None:
        if (name := self._failpoint.passes(point)) is not None:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number))
