"""The index beside the segments: whatever is there, or happens to it, the ledger is what the segments say."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from services.buffer.store.segments import SegmentStore
from tests.support.ledger_history import History
from tests.support.ledger_under_test import LedgerUnderTest


def filled(folder: Path, num_commands: int = 60) -> History:
    """A closed ledger, and what it holds."""
    history = History(SegmentStore(folder, segment_bytes=1 << 14))
    history.run(num_commands)
    history.store.close()
    return history


def assert_serves(folder: Path, history: History) -> None:
    """A store opened there has the latest moment, and every payload that its groups hold."""
    store = SegmentStore(folder, segment_bytes=1 << 14)
    snapshot = store.load()
    assert history.moments[-1].equals(snapshot)
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
