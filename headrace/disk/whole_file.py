"""Files that take another one's place whole: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk, a quota or a limit that has no room."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path`, with its suffix, that takes its name when the block ends; deleted when the block fails.

    It is not synced: what must survive a power loss syncs the draft in the block and the folder behind it.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
