"""Turns a disk's refusals into one OSError with the folder and the way out."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_BYTES = 256 << 10
"""The free space below which SQLite has no room for its log and reports an I/O error."""


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Wraps writes. When it raises, nothing of the write was stored."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        is_io = isinstance(error, sqlite3.OperationalError) and shutil.disk_usage(folder).free < _FEW_BYTES
        if is_io or error.sqlite_errorname == "SQLITE_FULL":
            raise _full(folder) from error
        raise OSError(
            errno.EIO, f"SQLite says {str(error)!r}, check the disk, then start the buffer again", str(folder)
        ) from error
    except OSError as error:
        if error.errno in _FULL:
            raise _full(folder) from error
        raise


def _full(folder: Path) -> OSError:
    return OSError(
        errno.ENOSPC,
        "the disk is full. Delete other files on it, and a buffer that runs goes on by itself; or stop it, move the "
        "folder to a larger disk, and start it again. Samples are deleted when their steps are committed",
        str(folder),
    )
