"""Outlasts a full disk: what it refused left nothing behind, and is tried again until there is space."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.errors import DiskFull
from headrace.rpc.log import log
from services.buffer.store.sqlite.disk_errors import disk_errors

_Result = TypeVar("_Result")
_RETRY_SECONDS = 0.5


class FullDisk:
    """Several threads may wait at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: dict[int, OSError] = {}
        """By thread."""
        self._stopped = threading.Event()

    @property
    def refusal(self) -> DiskFull | None:
        """What callers are told while a thread waits."""
        errors = list(self._refused.values())
        return DiskFull(str(errors[0]), retry_after_seconds=_RETRY_SECONDS) if errors else None

    def outlast(self, write: Callable[[], _Result]) -> _Result:
        """What it returns, once the disk has room for it. Any other OSError, and a full disk after `stop`, is raised.

        `write`: keeps all or nothing.
        """
        thread = threading.get_ident()
        try:
            while True:
                try:
                    with disk_errors(self._folder):
                        return write()
                except OSError as error:
                    if error.errno != errno.ENOSPC or self._stopped.is_set():
                        raise
                    if thread not in self._refused:
                        log.error("disk_full", message=str(error))
                    self._refused[thread] = error
                self._stopped.wait(_RETRY_SECONDS)
        finally:
            self._refused.pop(thread, None)

    def stop(self) -> None:
        """Nobody waits any more."""
        self._stopped.set()
