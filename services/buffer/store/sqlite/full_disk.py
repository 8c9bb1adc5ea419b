"""Waits out a full disk: a refused write left nothing behind, and is repeated until there is space."""

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
        """The error of a thread's last refused write, by thread id."""
        self._stopped = threading.Event()

    @property
    def refusal(self) -> DiskFull | None:
        """The error for callers while a thread waits, else None."""
        errors = list(self._refused.values())
        return DiskFull(str(errors[0]), retry_after_seconds=_RETRY_SECONDS) if errors else None

    def outlast(self, write: Callable[[], _Result]) -> _Result:
        """Repeats `write` until the disk has room. Raises any other OSError, and ENOSPC after `stop`.

        `write` must store everything or nothing.
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
        """Makes every wait end with an error."""
        self._stopped.set()
