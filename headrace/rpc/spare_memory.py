"""Gives memory that a flood of calls took back to the machine, once it is over.

glibc keeps what is freed for the next time, and one small block in use holds all that lies below it. `malloc_trim`
gives back the whole pages in between. Memory that is taken and freed again all the while is left alone.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.rpc.log import log

_LOOK_SECONDS = 2.0
_NUM_LOOKS = 5
_WORTH_BYTES = 16 << 20


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2, of all arenas together; `fordblks` is what is free, trimmed pages included."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


@dataclass(frozen=True, slots=True)
class Heap:
    """The C heap of this process, and what of the whole process is in memory."""

    free_bytes: Callable[[], int]
    resident_bytes: Callable[[], int]
    trim: Callable[[], None]


def glibc_heap() -> Heap | None:
    """None where the C library is another one, or older than 2.33."""
    library = ctypes.CDLL(None)
    try:
        mallinfo2, malloc_trim = library.mallinfo2, library.malloc_trim
    except AttributeError:
        return None
    mallinfo2.restype = _MallInfo2
    malloc_trim.argtypes = [ctypes.c_size_t]

    def trim() -> None:
        malloc_trim(0)

    return Heap(lambda: int(mallinfo2().fordblks), _resident_bytes, trim)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class SpareMemory:
    """Looks at the heap from a thread of its own. States: built → started → stopped."""

    def __init__(self, heap: Heap | None = None) -> None:
        self._heap = heap or glibc_heap()
        self._kept = 0
        """What was free after the last trim, or less: those pages are the machine's."""
        self._resident = 0
        """After the last trim. What has come since may be pages that were taken again and freed between two looks."""
        self._looks = deque[tuple[int, int]](maxlen=_NUM_LOOKS)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Does nothing where there is no such heap."""
        if self._heap is not None:
            threading.Thread(target=self._run, args=(self._heap,), name="spare-memory", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._stopped.set()

    def _run(self, heap: Heap) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            self.look(heap)

    def look(self, heap: Heap) -> None:
        """Trims where much has been free for several looks, and was not when it was trimmed last."""
        self._looks.append((heap.free_bytes(), heap.resident_bytes()))
        free, resident = map(min, zip(*self._looks, strict=True))
        self._kept = min(self._kept, free)
        unused = max(free - self._kept, min(free, resident - self._resident))
        if len(self._looks) < _NUM_LOOKS or unused < _WORTH_BYTES:
            return
        heap.trim()
        log.debug("memory_trimmed", free_bytes=unused)  # a start shows its last event of a higher level
        self._kept, self._resident = heap.free_bytes(), heap.resident_bytes()
        self._looks.clear()
