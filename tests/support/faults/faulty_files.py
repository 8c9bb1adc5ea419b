"""Files that fail at a named point: `NAME:ACTION:N` acts at the N-th time the point is passed.

Points: create, created, write, half-written, written, synced, sync, sync-folder, delete.
Actions: kill (as kill -9 does), EIO, ENOSPC, pause (half a second, once).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from services.buffer.store.files import Buffer, DiskFiles
from tests.support.faults.failpoint import Failpoint

POINTS = (
    "create", "created", "write", "half-written", "written", "sync", "synced", "sync-folder", "delete",
)  # fmt: skip
ACTIONS = ("kill", "EIO", "ENOSPC", "pause")


class FaultyFiles(DiskFiles):
    """Real files, and one fault."""

    def __init__(self, folder: Path, failpoint: str) -> None:
        super().__init__(folder)
        self._failpoint = Failpoint(failpoint)
        assert self._failpoint.point in POINTS, failpoint
        assert self._failpoint.action in ACTIONS, failpoint

    def create(self, name: str) -> None:
        self._pass("create")
        super().create(name)
        self._pass("created")

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        self._pass("write")
        whole = b"".join(parts)
        super().write(name, offset, [whole[: len(whole) // 2]])
        self._pass("half-written")
        super().write(name, offset, parts)
        self._pass("written")

    def sync(self, name: str) -> None:
        self._pass("sync")
        super().sync(name)
        self._pass("synced")

    def sync_folder(self) -> None:
        self._pass("sync-folder")
        super().sync_folder()

    def delete(self, name: str) -> None:
        self._pass("delete")
        super().delete(name)

    def _pass(self, point: str) -> None:
        if (name := self._failpoint.passes(point)) is not None:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number))
