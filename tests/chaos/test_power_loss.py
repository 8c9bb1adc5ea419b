"""The power is cut after every operation on payload files: what was answered is there, and nothing else is made up.

SQLite's own file is taken at its word: after a cut it holds what its last COMMIT before the cut left, which
`tests/contract/buffer/test_store_syncs.py` sees it sync. The mark beside it is not synced, and may be gone, torn or
older.
"""

from __future__ import annotations

import os
import random
import sqlite3
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.buffer.store.sqlite import FILE, SqliteStore, connect
from tests.support.faults.power_loss import Disk, Image, MemoryFiles
from tests.support.ledgers.ledger_history import History

# `make chaos` cuts before and after every single operation of 1,000 commands; here it is at drawn ones.
NUM_COMMANDS = int(os.environ.get("HEADRACE_POWER_COMMANDS", "200"))
CUTS = os.environ.get("HEADRACE_POWER_CUTS", "30")
_LARGE_CALL_BYTES = 1_000
"""Half of the calls are files."""
_RETAIN_EVENTS = 200


@dataclass
class Commits:
    """What SQLite held after each commit, and how many operations on payload files had been done by then."""

    files: MemoryFiles
    at: list[int] = field(default_factory=list)
    databases: list[bytes] = field(default_factory=list)
    marks: list[bytes] = field(default_factory=list)

    def add(self, connection: sqlite3.Connection, mark: Path) -> None:
        self.at.append(len(self.files.operations))
        self.databases.append(connection.serialize())
        self.marks.append(mark.read_bytes() if mark.exists() else b"")


class _Kept(sqlite3.Connection):
    commits: Commits
    mark: Path

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        cursor = super().execute(sql, *parameters)
        if sql == "COMMIT":
            self.commits.add(self, self.mark)
        return cursor


@pytest.mark.timeout(600 + (10 if CUTS == "every" else 3) * NUM_COMMANDS)
def test_whatever_was_answered_is_there_after_a_power_loss_at_any_operation(tmp_path: Path) -> None:
    files = MemoryFiles({})
    commits = Commits(files)

    def connect_kept(path: Path) -> sqlite3.Connection:
        connection = connect(path, _Kept)
        assert isinstance(connection, _Kept)
        connection.commits, connection.mark = commits, path.with_name("position")
        return connection

    store = SqliteStore(
        tmp_path / "run", large_call_bytes=_LARGE_CALL_BYTES, open_files=lambda _: files, connect_writer=connect_kept
    )
    answered: list[int] = []  # operations done when each moment was answered
    history = History(store, on_answer=lambda: answered.append(len(files.operations)), retain_events=_RETAIN_EVENTS)
    for _ in range(NUM_COMMANDS):
        history.step()
    store.close()
    assert any(operation.kind == "delete" for operation in files.operations)
    chance = random.Random(3)
    prefixes = range(len(files.operations) + 1)
    cuts = prefixes if CUTS == "every" else sorted(chance.sample(prefixes, min(int(CUTS), len(prefixes))))
    disk, done, num_disks = Disk(), 0, 0
    for cut in cuts:
        for operation in files.operations[done:cut]:
            disk.ask(operation)
        done = cut
        # Of the commits that came after the last operation before the cut, any may have been the last.
        first = max(bisect_right(commits.at, cut - 1) - 1, 0)
        last = max(bisect_right(commits.at, cut) - 1, 0)
        if not commits.at or commits.at[0] > cut:
            continue
        for image in (disk.everything(), disk.nothing_more(), disk.some(chance), disk.some(chance)):
            commit = chance.randint(first, last)
            num_answered = bisect_right(answered, cut - 1) if commit < last else bisect_right(answered, cut)
            check(history, commits, commit, image, tmp_path / "disk", num_answered if commit == last else 0, chance)
            num_disks += 1
    print(f"{len(cuts)} of {len(prefixes)} prefixes of {NUM_COMMANDS} commands' operations, {num_disks} disks opened")


def check(
    history: History,
    commits: Commits,
    commit: int,
    image: Image,
    folder: Path,
    num_answered: int,
    chance: random.Random,
) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(commits.databases[commit])
    mark = chance.choice([None, b"", commits.marks[commit], commits.marks[max(commit - 5, 0)], bytes(28)])
    if mark is not None:
        (folder / "position").write_bytes(mark)
    store = SqliteStore(folder, large_call_bytes=_LARGE_CALL_BYTES, open_files=lambda _: MemoryFiles(image))
    snapshot = store.load()
    assert store.damage() == []
    if snapshot.streams or num_answered:
        moments = range(max(num_answered - 1, 0), len(history.moments))
        found = next(k for k in moments if history.moments[k].equals(snapshot))
        for group in history.moments[found].groups.values():
            records = list(group.records)
            assert list(map(bytes, store.read_payloads(records))) == [history.payloads[r.key] for r in records]
    positions = [e.position for e in store.read_events(1, 1_000_000)]
    assert positions == list(range(snapshot.oldest_position, snapshot.position + 1))
    store.close()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
