"""A file whose content is read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from headrace.errors import ConfigError

T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""A change counts after so long at the latest; between two looks a call costs no system call."""

_Mark = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """`read` raises ConfigError for a file that cannot be used."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        """Raises ConfigError for a file that cannot be used now."""
        self.path = path
        self._read = read
        self._mark = _mark_of(path)
        self._content: T | ConfigError = read(path)
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def content(self) -> T:
        """Returns what the file holds, or held half a second ago. Raises ConfigError while it cannot be used."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._look()
        if isinstance(self._content, ConfigError):
            raise self._content
        return self._content

    def _look(self) -> None:
        mark = _mark_of(self.path)
        if mark == self._mark and mark is not None:
            return
        self._mark = mark
        try:
            self._content = self._read(self.path)
        except ConfigError as error:
            self._content = error


def _mark_of(path: Path) -> _Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
