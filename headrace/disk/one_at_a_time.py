"""Files that several commands change, each by reading it, changing it and writing it whole: one after the other.

Two at once would undo one another's change: a token that was revoked would be back with the next one that is added.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ConfigError

_ASK_AGAIN_SECONDS = 0.02
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that has none: commands are then as alone as their users make them."""


@contextmanager
def one_at_a_time(file: Path, wait_seconds: float = 10.0) -> Iterator[None]:
    """Keeps other commands from changing the file meanwhile, which takes milliseconds; a killed one's lock is free.

    Raises ConfigError where its folder cannot be written, and when another command goes on for `wait_seconds`.
    """
    lock = file.with_name(f".{file.name}.lock")
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be changed: {file.parent}: {error.strerror}: name a folder that is there and that you can "
            "write to"
        ) from error
    try:
        _wait_for(descriptor, file, wait_seconds)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, file: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ConfigError(
                    f"another command has been changing {file} for {seconds:g} s: end it, and try again"
                ) from None
            time.sleep(_ASK_AGAIN_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
        else:
            return
