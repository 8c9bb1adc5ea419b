"""metrics.jsonl: a row a line. Memory holds none of the rows that are written, however many steps a run has.

Rows that the disk refuses wait in memory and are written before later ones. One thread writes; any may read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.disk.whole_file import replacing
from headrace.metrics_row import MetricsRow, row_of, step_of
from headrace.rpc.log import log
from services.trainer.files.durable_rows import append_rows

MOST_WAITING = 10_000
"""Rows that wait for the disk; beyond that the oldest are lost."""
_PART_BYTES = 256 << 10


class MetricsFile:
    """`drop_after` first: before it, and until the disk took it, nothing of an earlier start's rows is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._drop_after: int | None = None
        """Later steps' rows go before anything is written."""
        self._num_bytes = 0
        """The readable part: whole lines, of rows that stay."""
        self._said = False

    def drop_after(self, step: int) -> None:
        """Keeps the rows that an earlier start wrote up to `step`, and drops the later ones."""
        self._drop_after = step
        self._write()

    def append(self, row: MetricsRow) -> None:
        """Adds a row. It raises nothing: what the disk refuses is written later."""
        self._waiting.append(row.fields())
        self._write()

    def settle(self) -> None:
        """Writes what waits, if the disk takes it."""
        if self._waiting or self._drop_after is not None:
            self._write()

    def rows(self) -> Iterator[MetricsRow]:
        """Yields all rows that are written."""
        offset, end = 0, self._num_bytes
        while offset < end:
            some, offset = self.read(offset)
            yield from some

    def read(self, offset: int, from_step: int = 0) -> tuple[list[MetricsRow], int]:
        """Returns some of the rows at `offset`, those before `from_step` left out, and the offset behind them.

        At the end of what is written the offset stays what it is.
        """
        if (left := self._num_bytes - offset) <= 0:
            return [], offset
        with self._path.open("rb") as file:
            file.seek(offset)
            lines = file.readlines(min(_PART_BYTES, left))
        wanted = (line for line in lines if from_step == 0 or (step_of(line) or 0) >= from_step)
        rows = (row_of(line) for line in wanted)
        return [row for row in rows if row is not None], offset + sum(map(len, lines))

    def _write(self) -> None:
        try:
            if self._drop_after is not None:
                self._drop(self._drop_after)
                self._drop_after = None
            append_rows(self._path, self._waiting, synced=False)
        except OSError as error:
            if not self._said:
                until = f"the disk takes them; the last {MOST_WAITING} are kept"
                log.warning("metrics_not_written", file=str(self._path), error=str(error), until=until)
            self._said = True
            return
        self._waiting.clear()
        self._said = False
        self._num_bytes = self._path.stat().st_size

    def _drop(self, step: int) -> None:
        """Replaces the file by one without the later steps' lines, if it has any."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if not any(_is_later(line, step) for line in file):
                return
            file.seek(0)
            with replacing(self._path) as draft, draft.open("wb") as shorter:
                shorter.writelines(line for line in file if not _is_later(line, step))


def _is_later(line: bytes, step: int) -> bool:
    found = step_of(line)
    return found is not None and found > step
