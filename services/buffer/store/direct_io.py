"""Large writes and reads past the page cache, through an aligned buffer that each thread keeps.

A payload is written once and read about once. The page cache copies it into pages that it has to find first, which may
cost ten times what the disk's own transfer does, and drops other pages for them. Writes that share a block with others,
at both ends, go through the cache, so that no block with earlier bytes is ever written past it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | memoryview

_BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 << 20
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectIo:
    """Any thread may call any method; `cached` and `direct` are descriptors of one file."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def write(self, cached: int, direct: int, offset: int, parts: Sequence[Buffer]) -> None:
        """Writes the parts one after the other."""
        buffer = self._buffer()
        start = filled = offset % _BLOCK_BYTES
        base = offset - start
        for part in parts:
            rest = memoryview(part)
            while rest:
                count = min(len(rest), _BUFFER_BYTES - filled)
                buffer[filled : filled + count] = rest[:count]
                rest, filled = rest[count:], filled + count
                if filled == _BUFFER_BYTES:
                    _flush(cached, direct, base, buffer, start, filled)
                    base, start, filled = base + filled, 0, 0
        _flush(cached, direct, base, buffer, start, filled)

    def read(self, direct: int, offset: int, num_bytes: int) -> bytes:
        """Reads at most `num_bytes`; fewer at the end of the file."""
        buffer, chunks = self._buffer(), list[bytes]()
        end = offset + num_bytes
        while offset < end:
            start = offset % _BLOCK_BYTES
            wanted = min(_up(start + end - offset), _BUFFER_BYTES)
            count = os.preadv(direct, [buffer[:wanted]], offset - start)
            chunks.append(bytes(buffer[start : min(count, start + end - offset)]))
            offset += len(chunks[-1])
            if count < wanted:
                break
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _buffer(self) -> memoryview:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        buffer: memoryview = self._of_thread.buffer
        return buffer


def open_direct(path: Path) -> int | None:
    """Opens the file for transfers past the page cache; returns None where its file system has none."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return None


def is_refusal(error: OSError) -> bool:
    """True when the file system or its disk does no such transfer, or wants larger blocks."""
    return error.errno in _REFUSALS


def _flush(cached: int, direct: int, base: int, buffer: memoryview, start: int, end: int) -> None:
    """Writes buffer[start:end], whose first block lies at `base`; whole blocks go past the cache."""
    first = min(_up(start), end)
    last = max(end - end % _BLOCK_BYTES, first)
    for descriptor, low, high in ((cached, start, first), (direct, first, last), (cached, last, end)):
        while low < high:
            low += os.pwrite(descriptor, buffer[low:high], base + low)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
