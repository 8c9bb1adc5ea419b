"""A prompt file whose rows are found at random: every row once in every epoch, in the file's order or a drawn one.

Opening reads the whole file once: bad lines are found before the first step, not in the middle of a run. A row is known
by its line number; a prompt by file name, line and epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.errors import InvalidArgument
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.reader import PromptEntry, Reading, without_prompts
from services.buffer.prompts.row import RowReader


class FileRows(Protocol):
    """The rows of a file's slice, good and bad, by index. They are parsed with the reader that was passed in."""

    digest: str

    def numbers(self) -> Iterator[int]:
        """The line number of each row; blank lines are no rows."""

    def retain(self, indices: Sequence[int]) -> None:
        """Drops all other rows; indices count the remaining ones from now on."""

    def prompts(self, indices: Sequence[int], epoch: int) -> list[Prompt]:
        """Raises InvalidArgument naming the line of a bad one."""


class IndexedFile:
    """Raises InvalidArgument naming path and line for a bad line, unless the source skips and counts them."""

    def __init__(self, rows: FileRows, reader: RowReader, readers: BlockingPool) -> None:
        self._rows = rows
        self._readers = readers
        self._source = reader.source
        self._epoch_order: tuple[int, Sequence[int]] | None = None
        good, total = [], 0
        for index, _ in enumerate(rows.numbers()):
            total += 1
            if self._is_good(index):
                good.append(index)
        if not good:
            raise without_prompts(Path(self._source.path))
        self.bad_lines = total - len(good)
        self.digest = rows.digest
        self._length = len(good)
        if self.bad_lines:
            rows.retain(good)

    def __len__(self) -> int:
        return self._length

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts; fewer where the last epoch ends."""
        return await self._readers.run(self._read, cursor, count)

    def is_end(self, cursor: Cursor) -> bool:
        """True when all epochs were read."""
        return self._source.num_epochs is not None and cursor.epoch >= self._source.num_epochs

    async def close(self) -> None:
        """It holds nothing open."""

    def _read(self, cursor: Cursor, count: int) -> Reading:
        entries: list[PromptEntry] = []
        while len(entries) < count and not self.is_end(cursor):
            end = min(cursor.row + count - len(entries), len(self))
            rows = self._order(cursor.epoch)[cursor.row : end]
            for prompt in self._rows.prompts(rows, cursor.epoch):
                cursor = self._next(cursor)
                entries.append(PromptEntry(prompt, cursor))
        return Reading(entries, cursor)

    def _next(self, cursor: Cursor) -> Cursor:
        moved = replace(cursor, row=cursor.row + 1, prompts_read=cursor.prompts_read + 1)
        return moved if moved.row < len(self) else replace(moved, epoch=cursor.epoch + 1, row=0)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._source.shuffle:
            return range(len(self))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, drawn_order(len(self), f"{self._source.seed}/{epoch}"))
        return self._epoch_order[1]

    def _is_good(self, index: int) -> bool:
        try:
            self._rows.prompts([index], epoch=0)
        except InvalidArgument:
            if not self._source.skip_bad_lines:
                raise
            return False
        return True


def drawn_order(length: int, seed: str) -> list[int]:
    """Equal for equal arguments in every version: Python promises that for random(), and not for shuffle()."""
    generator = random.Random(seed)
    keys = np.fromiter((generator.random() for _ in range(length)), np.float64, length)
    # numpy sorts without the interpreter: of a million rows Python's own sort would hold it for a second.
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order
