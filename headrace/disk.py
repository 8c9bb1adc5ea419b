"""Files that several processes read and write: locked, replaced whole, and read again when they change."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from headrace.errors import ConfigError, FailedPrecondition

_ASK_AGAIN_SECONDS = 0.02
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class NoLocks(OSError):
    """The file system has none."""


def lock(file: IO[Any], wait_seconds: float = 0.0, *, shared: bool = False) -> bool:
    """Locks the file until it is closed; False while another opening of it, here or elsewhere, has the lock.

    A shared lock only keeps out those that are not shared. Raises NoLocks, and OSError as the file system does.
    """
    until = time.monotonic() + wait_seconds
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_ASK_AGAIN_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise NoLocks(*error.args) from error
        else:
            return True


# Files that several commands change, each by reading it, changing it and writing it whole: one after the other.
#
# Two at once would undo one another's change: a token that was revoked would be back with the next one that is added.


@contextmanager
def file_lock(file: Path, wait_seconds: float = 10.0) -> Iterator[None]:
    """Keeps other commands from changing the file meanwhile, which takes milliseconds; a killed one's lock is free.

    Raises ConfigError where its folder cannot be written, and when another command goes on for `wait_seconds`.
    """
    try:
        opened = file.with_name(f".{file.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be changed: {file.parent}: {error.strerror}: name a folder that is there and that you can "
            "write to"
        ) from error
    with opened:
        with suppress(NoLocks):  # commands are then as alone as their users make them
            if not lock(opened, wait_seconds):
                raise ConfigError(
                    f"another command has been changing {file} for {wait_seconds:g} s: end it, and try again"
                )
        yield


FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk, a quota or a limit that has no room."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A draft beside `path`, with its suffix, that takes its name when the block ends; deleted when the block fails.

    It is not synced: see durable_write.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def durable_write(path: Path) -> Iterator[Path]:
    """The same for a file that survives a power loss once the block has ended."""
    with atomic_write(path) as draft:
        yield draft
        sync(draft)
    sync(path.parent)


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, survive a power loss from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Writes files by their names, and returns those. Raises FailedPrecondition for a folder that has one of them."""
    if there := [name for name in texts if (folder / name).exists()]:
        raise FailedPrecondition(f"{folder.absolute()} has {', '.join(there)} already: name an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with atomic_write(folder / name) as draft:
            draft.write_text(text)
    return sorted(texts)


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
