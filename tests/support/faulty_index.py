"""A segment index that fails at a named point, `NAME:ACTION:N`: the real SQLite, told by the system that it cannot.

Points: index (before a transaction), index-commit (everything of it written, not committed), index-committed.
Actions: kill and pause as in `faulty_files`; EIO (no file of the process may grow beyond 20 KiB, which SQLite reports
as an I/O error) and ENOSPC (no page is left), both met in the middle of the transaction that follows.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.buffer.store.index_rows import Applied
from services.buffer.store.segment_index import Mark, SegmentIndex
from tests.support.failpoint import Failpoint

INDEX_FAILPOINTS = (
    ("index", "kill"), ("index", "EIO"), ("index", "ENOSPC"), ("index", "pause"),
    ("index-commit", "kill"), ("index-commit", "pause"), ("index-committed", "kill"), ("index-committed", "pause"),
)  # fmt: skip


_EIO_FILE_BYTES = 20 << 10
"""Segments of 16 KiB are still written."""


class FaultyIndex(SegmentIndex):
    """One fault."""

    def __init__(self, path: Path, failpoint: str) -> None:
        super().__init__(path)
        self._failpoint = Failpoint(failpoint)
        assert (self._failpoint.point, self._failpoint.action) in INDEX_FAILPOINTS, failpoint

    def apply(self, batch: Sequence[Applied], mark: Mark | None = None, lost: Sequence[tuple[str, int]] = ()) -> None:
        is_opening = mark is None or not batch
        if not is_opening:
            self._pass("index")
        super().apply(batch, mark, lost)
        if not is_opening:
            self._pass("index-committed")

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        super()._insert(table, rows)
        if table == "meta":
            self._pass("index-commit")

    def _pass(self, point: str) -> None:
        match self._failpoint.passes(point):
            case "EIO":
                resource.setrlimit(resource.RLIMIT_FSIZE, (_EIO_FILE_BYTES, resource.RLIM_INFINITY))
            case "ENOSPC":
                (num_pages,) = self._writer.execute("PRAGMA page_count").fetchone()
                self._writer.execute(f"PRAGMA max_page_count = {num_pages}")
