"""Frees disk space: live payloads of a mostly dead file are copied to the current file, and the old one is deleted.

sealed → (its live extents are copied, synced, and their rows changed in one transaction) → unnamed → deleted
A kill in between leaves copies that no row names, or a file that no row names: the next start deletes either.
Unblocked by deleted payloads. A damaged extent stays where it is, and its file with it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from headrace.rpc.log import log
from services.buffer.store.sqlite.extent import Extent, Extents
from services.buffer.store.sqlite.payload_files import PayloadFiles

_WORTH_LIVE_FRACTION = 0.5
_SMALL_FRACTION = 1 / 16
_CHUNK_BYTES = 2 << 20
_SPARE_BYTES = 128 << 10
"""Free space that SQLite needs for its log."""


class Compacted(Protocol):
    """The store's methods that the compactor uses."""

    def move(self, extents: Sequence[Extent]) -> int:
        """Copies the extents that are still live; returns the payload bytes that are durable at their new location."""

    def extents_of(self, file_id: bytes) -> list[Extent]:
        """Returns the file's extents that rows name now."""

    def delete_unnamed(self, file_id: bytes) -> bool:
        """Deletes the file unless a row names it; returns True if it did."""

    def free_bytes(self) -> int | None:
        """Returns the free space of the disk."""


class Compactor:
    """Runs in one thread of its own; `compact` may be called without it."""

    def __init__(
        self, store: Compacted, extents: Extents, files: PayloadFiles, file_bytes: int, kept: Iterable[bytes] = ()
    ) -> None:
        self._store = store
        self._extents = extents
        self._files = files
        self._small_bytes = file_bytes * _SMALL_FRACTION
        self._stuck = set(kept)
        """Files with damaged extents, and `kept`: those that may hold what a lost row named."""
        self._compacting = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="compactor", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tells the thread that payloads were deleted."""
        self._wake.set()

    def check(self) -> None:
        """Raises the error that stopped the thread."""
        if self._error:
            raise self._error

    def close(self) -> None:
        """Finishes the current file, then ends the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def compact(self) -> int:
        """Returns the number of files deleted."""
        with self._compacting:
            return sum(self._compact(file_id) for file_id in self._candidates() if not self._closing)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                self.compact()
        except Exception as error:  # noqa: BLE001  # handed to the writer, which ends the process
            self._error = error

    def _candidates(self) -> list[bytes]:
        """Returns sealed files worth compacting, the emptiest first: on a full disk they make room for the others."""
        sealed = {f for f in self._files.file_ids() - self._stuck if not self._files.is_open(f)}
        return sorted(filter(self._is_worth, sealed), key=self._extents.live_bytes)

    def _is_worth(self, file_id: bytes) -> bool:
        num_bytes = self._files.num_bytes(file_id)
        return num_bytes < self._small_bytes or self._extents.live_bytes(file_id) < num_bytes * _WORTH_LIVE_FRACTION

    def _compact(self, file_id: bytes) -> bool:
        live_bytes, free_bytes = self._extents.live_bytes(file_id), self._store.free_bytes()
        if live_bytes and free_bytes is not None and free_bytes < live_bytes + _SPARE_BYTES:
            return False
        try:
            moved = sum(self._store.move(chunk) for chunk in _chunks(self._store.extents_of(file_id)))
            is_deleted = self._store.delete_unnamed(file_id)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            log.warning("payload_file_kept", file_id=file_id.hex(), error=str(error))  # until more is deleted
            return False
        if not is_deleted:
            self._stuck.add(file_id)
            return False
        log.info("payload_file_deleted", file_id=file_id.hex(), moved_bytes=moved)
        return True


def _chunks(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Cuts the work into chunks, so that writers wait for one chunk at most."""
    chunk: list[Extent] = []
    for extent in extents:
        chunk.append(extent)
        if sum(e.num_bytes for e in chunk) >= _CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
