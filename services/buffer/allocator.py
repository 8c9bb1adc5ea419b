"""Large requests come and go: glibc is told to keep their memory instead of mapping new pages each time."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_large_blocks() -> None:
    """Once, at the start of a process. Other C libraries than glibc decide for themselves."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
