"""Large requests come and go, so glibc is told to keep their memory instead of mapping new pages each time."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_large_blocks() -> None:
    """Call it once, at the start of a process. It does nothing where the C library is not glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
