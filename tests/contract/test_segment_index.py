"""The index beside the segments: whatever is there, or happens to it, the ledger is what the segments say."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.buffer.store.index_rows import Applied
from services.buffer.store.segment_index import Mark, SegmentIndex
from services.buffer.store.segments import SegmentStore
from tests.support.faulty_index import FaultyIndex
from tests.support.ledger_history import History
from tests.support.ledger_under_test import LedgerUnderTest


def filled(folder: Path, num_commands: int = 60) -> History:
    """A closed ledger, and what it holds."""
    history = History(SegmentStore(folder, segment_bytes=1 << 14))
    history.run(num_commands)
    history.store.close()
    return history


def assert_serves(folder: Path, history: History, num_answered: int | None = None) -> None:
    """A store opened there has the latest moment, or one since so many answers, and every payload of its groups."""
    store = SegmentStore(folder, segment_bytes=1 << 14)
    snapshot = store.load()
    first = len(history.moments) if num_answered is None else num_answered
    assert any(moment.equals(snapshot) for moment in history.moments[max(first - 1, 0) :])
    records = [record for group in snapshot.groups for record in group.records]
    assert store.read_payloads(records) == [history.payloads[record.key] for record in records]
    assert len(store.read_events(1, 1_000_000)) == snapshot.position
    store.close()


def test_an_index_of_an_older_layout_is_made_again_and_the_log_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = filled(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("DROP TABLE samples")
        index.execute("PRAGMA user_version = 1")
    index.close()
    assert_serves(tmp_path, history)
    assert "its tables have layout 1, this headrace writes 2" in capsys.readouterr().out
    assert_serves(tmp_path, history)
    assert "index_rebuilt" not in capsys.readouterr().out


def test_a_history_much_longer_than_a_page_is_read_page_by_page_from_the_segments(tmp_path: Path) -> None:
    filled(tmp_path, 200)
    it = LedgerUnderTest(SegmentStore(tmp_path, segment_bytes=1 << 14))
    position, found = 1, list[int]()
    while events := it.store.read_events(position, 7):
        assert len(events) == 7 or events[-1].position == it.ledger.position
        found += [event.position for event in events]
        position = events[-1].position + 1
    assert found == list(range(1, it.ledger.position + 1))
    it.store.close()


class CopiedIndex(SegmentIndex):
    """At some transactions the whole folder is copied, as a kill there would leave it: not committed, and committed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path.parent
        self.num_transactions = 0
        self.num_answered: Callable[[], int] = lambda: 0

    def apply(self, batch: Sequence[Applied], mark: Mark | None = None, lost: Sequence[tuple[str, int]] = ()) -> None:
        super().apply(batch, mark, lost)
        self.num_transactions += 1
        self._copy("committed")

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        super()._insert(table, rows)
        if table == "meta":
            self._copy("written")

    def _copy(self, moment: str) -> None:
        if self.num_transactions % 7 == 3:
            name = f"copy-{self.num_transactions}-{moment}-{self.num_answered()}"
            shutil.copytree(self._folder, self._folder.parent / name)


def test_a_kill_inside_of_an_index_transaction_or_behind_it_loses_nothing(tmp_path: Path) -> None:
    indexes: list[CopiedIndex] = []

    def index_at(path: Path) -> SegmentIndex:
        indexes.append(CopiedIndex(path))
        return indexes[-1]

    store = SegmentStore(tmp_path / "run", segment_bytes=1 << 20, index_at=index_at)  # one segment: none is deleted
    history = History(store)
    indexes[0].num_answered = lambda: len(history.moments)
    for _ in range(60):
        history.step()
        store.flush_index()
    copies = sorted(tmp_path.glob("copy-*"))
    assert len(copies) > 8
    for copy in copies:
        assert_serves(copy, history, int(copy.name.rpartition("-")[2]))
    store.close()


def test_an_index_whose_disk_is_full_ends_the_ledger_and_what_was_answered_is_there(tmp_path: Path) -> None:
    full = partial(FaultyIndex, failpoint="index:ENOSPC:5")
    store = SegmentStore(tmp_path / "run", segment_bytes=1 << 14, index_at=full)
    history = History(store)
    with pytest.raises(OSError, match="the index could not be written: database or disk is full"):
        history.run(10_000)
    answered = len(history.moments)
    for _ in range(3):
        with pytest.raises(OSError, match="disk is full"):
            history.it.submit(f"later-{answered}")
    assert len(history.moments) == answered
    shutil.copytree(tmp_path / "run", tmp_path / "after")
    assert_serves(tmp_path / "after", history)
