"""Reads every payload that an earlier process wrote, once, after the start, to find damage early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from services.buffer.store.sqlite.extent import Extent

_PAUSE_BYTES = 4 << 20
_PAUSE_SECONDS = 0.005
"""A pause between two chunks lets other users of the disk and the interpreter go first."""


class Scrub:
    """Runs in one thread, which ends with the last extent."""

    def __init__(self, extents: Sequence[Extent], check: Callable[[Extent], None]) -> None:
        self._extents = extents
        self._check = check
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when everything was read."""
        self._thread.join()

    def close(self) -> None:
        """Ends the thread early."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        num_bytes = 0
        for extent in self._extents:
            if self._closing.is_set():
                return
            self._check(extent)
            num_bytes += extent.num_bytes
            if num_bytes >= _PAUSE_BYTES:
                num_bytes = 0
                self._closing.wait(_PAUSE_SECONDS)
