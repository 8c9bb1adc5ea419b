"""Brings the index up to date behind the writer, many batches in one SQLite transaction.

Until then the latest events are answered from memory. Unblocked by: the writer; `flush` and `close` wait for it.
When it falls far behind, the writer waits. An error of its own ends the ledger at the next commit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.buffer.store.index_rows import Applied
from services.buffer.store.segment_index import Mark, SegmentIndex
from services.buffer.transaction import LedgerEvent

_PAUSE_SECONDS = 0.2
_MAX_QUEUED_BYTES = 32 << 20


class Indexer:
    """One thread."""

    def __init__(self, index: SegmentIndex) -> None:
        self._index = index
        self._changed = threading.Condition()
        self._queued: list[Applied] = []
        self._queued_bytes = 0
        self._mark: Mark | None = None
        """Of what was added last; None when all of it is in the index."""
        self._num_added = 0
        self._num_applied = 0
        self._events: list[LedgerEvent] = []
        """Not in the index yet, the latest last."""
        self._error: Exception | None = None
        self._closing = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what stopped the thread; waits while it is far behind."""
        with self._changed:
            while self._queued_bytes > _MAX_QUEUED_BYTES and self._error is None:
                self._changed.wait()
            if self._error:
                raise self._error

    def add(self, applied: Sequence[Applied], events: Sequence[LedgerEvent], mark: Mark) -> None:
        """Durable in the segments already."""
        with self._changed:
            self._queued += applied
            self._queued_bytes += sum(a.num_bytes for a in applied)
            self._events += events
            self._mark = mark
            self._num_added += 1
            self._changed.notify_all()

    def recent(self, from_position: int, count: int) -> list[LedgerEvent] | None:
        """None when the index has to be asked."""
        with self._changed:
            if not self._events:
                return None
            skipped = max(from_position, 1) - self._events[0].position
            return self._events[skipped : skipped + count] if skipped >= 0 else None

    def flush(self) -> None:
        """Returns when everything added so far is in the index."""
        with self._changed:
            wanted = self._num_added
            self._hurry.set()
            while self._num_applied < wanted and self._error is None:
                self._changed.wait()
            if self._error:
                raise self._error

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        with self._changed:
            self._closing = True
            self._hurry.set()
            self._changed.notify_all()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while self._step():
                self._hurry.wait(_PAUSE_SECONDS)  # what comes meanwhile goes into one transaction
                self._hurry.clear()
        except Exception as error:  # handed to the writer, which ends the process
            with self._changed:
                self._error = OSError(f"the index could not be written: {error}")
                self._error.__cause__ = error
                self._changed.notify_all()

    def _step(self) -> bool:
        """False after the last."""
        with self._changed:
            while self._mark is None and not self._closing:
                self._changed.wait()
            batch, mark, num_events = self._queued, self._mark, len(self._events)
            num_bytes, num_added = self._queued_bytes, self._num_added
            self._queued = []
        if mark is None:
            return False
        self._index.apply(batch, mark)
        with self._changed:
            self._queued_bytes -= num_bytes
            self._num_applied = num_added
            del self._events[:num_events]
            if self._mark is mark:
                self._mark = None
            self._changed.notify_all()
        return True
