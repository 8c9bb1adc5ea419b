"""How the buffer's process keeps its memory: large requests come and go, and a ledger's rows stay."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_large_blocks() -> None:
    """Tells glibc to keep the memory of large requests instead of mapping new pages each time.

    Call it once, at the start of a process. It does nothing where the C library is not glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextmanager
def long_lived() -> Iterator[None]:
    """Switches the cyclic collector off inside, and exempts all that exists at the end from it for good.

    Loading makes a million objects that stay: the collector would walk them again and again while they are made, and
    later stop the server at every full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
