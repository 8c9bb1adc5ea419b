"""A disk that takes no byte more, for this process: files cannot grow beyond a size (RLIMIT_FSIZE)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """A write that goes beyond is done up to there, and the next one raises EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
