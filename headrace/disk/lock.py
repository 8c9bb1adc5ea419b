"""Locks on open files, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import time
from typing import IO, Any

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
