"""What others may read of a folder, and what the umask lets them read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def umask(mask: int) -> Iterator[int]:
    """This process makes files under this umask in the block; gives the one that was there before."""
    before = os.umask(mask)
    try:
        yield before
    finally:
        os.umask(before)


def closed(folder: Path) -> Sequence[str]:
    """The files and folders in it, and itself, that fewer users may read than the umask lets; links are left out."""
    with umask(0o077) as mask:
        pass
    entries = [each for each in (folder, *sorted(folder.rglob("*"))) if not each.is_symlink()]
    return [
        f"{each.relative_to(folder)}: {each.stat().st_mode & 0o777:o}"
        for each in entries
        if (0o555 if each.is_dir() else 0o444) & ~mask & ~each.stat().st_mode
    ]
