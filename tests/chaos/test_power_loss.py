"""The power is cut after every file operation of a run: what was answered is there, and nothing else is made up."""

from __future__ import annotations

import os
import random
import sqlite3
from bisect import bisect_right
from pathlib import Path

import pytest

from services.buffer.store.segments import SegmentStore
from tests.support.ledger_history import History
from tests.support.power_loss import Disk, Image, MemoryFiles

# `make chaos` cuts before and after every single operation of 1,000 commands; here it is at drawn ones.
NUM_COMMANDS = int(os.environ.get("HEADRACE_POWER_COMMANDS", "300"))
CUTS = os.environ.get("HEADRACE_POWER_CUTS", "40")
SEGMENT_BYTES = 16 << 10
RETAIN_EVENTS = 200


def open_store(image: Image, folder: Path) -> SegmentStore:
    return SegmentStore(folder, segment_bytes=SEGMENT_BYTES, open_files=lambda _: MemoryFiles(image))


@pytest.mark.timeout(600 + (10 if CUTS == "every" else 3) * NUM_COMMANDS)
def test_whatever_was_answered_is_there_after_a_power_loss_at_any_operation(tmp_path: Path) -> None:
    files = MemoryFiles({})
    store = SegmentStore(tmp_path / "run", segment_bytes=SEGMENT_BYTES, open_files=lambda _: files)
    answered: list[int] = []  # operations done when each moment was answered
    history = History(store, on_answer=lambda: answered.append(len(files.operations)), retain_events=RETAIN_EVENTS)
    stale: list[tuple[int, Path]] = []
    for number in range(NUM_COMMANDS):
        history.step()
        if number % 100 == 50:
            store.flush_index()
            stale.append((len(files.operations), copy_index(tmp_path, number)))
    store.close()
    assert any(operation.kind == "delete" for operation in files.operations)
    chance = random.Random(3)
    prefixes = range(len(files.operations) + 1)
    cuts = prefixes if CUTS == "every" else sorted(chance.sample(prefixes, min(int(CUTS), len(prefixes))))
    disk, done, num_disks = Disk(), 0, 0
    for number, cut in enumerate(cuts):
        for operation in files.operations[done:cut]:
            disk.ask(operation)
        done = cut
        images = [disk.everything(), disk.nothing_more(), disk.some(chance), disk.some(chance)]
        num_answered = bisect_right(answered, cut)
        for variant, image in enumerate(images):
            index = [path for at, path in stale if last_delete(files, cut) <= at <= cut][-1:] if variant % 2 else []
            folder = tmp_path / f"{number}-{variant}"
            check(history, image, folder, num_answered, index)
            num_disks += 1
    print(f"{len(cuts)} of {len(prefixes)} prefixes of {NUM_COMMANDS} commands' operations, {num_disks} disks opened")


def last_delete(files: MemoryFiles, cut: int) -> int:
    """No index is older than the last segment that was deleted: it was synced before."""
    return max((i for i, o in enumerate(files.operations[:cut]) if o.kind == "delete"), default=0)


def copy_index(folder: Path, number: int) -> Path:
    copy = folder / f"index-{number}"
    with sqlite3.connect(folder / "run" / "index.sqlite") as source, sqlite3.connect(copy) as target:
        source.backup(target)
    source.close()
    target.close()
    return copy


def check(history: History, image: Image, folder: Path, num_answered: int, index: list[Path]) -> None:
    folder.mkdir()
    for path in index:
        (folder / "index.sqlite").write_bytes(path.read_bytes())
    store = open_store(image, folder)
    snapshot = store.load()
    assert snapshot.quarantined == ()
    if snapshot.streams or num_answered:
        moments = range(max(num_answered - 1, 0), len(history.moments))
        (found, *_) = [k for k in moments if history.moments[k].equals(snapshot)]
        for group in history.moments[found].groups.values():
            records = list(group.records)
            assert store.read_payloads(records) == [history.payloads[r.key] for r in records]
    positions = [e.position for e in store.read_events(1, 1_000_000)]
    assert positions == list(range(snapshot.oldest_position, snapshot.position + 1))
    assert snapshot.oldest_position <= max(snapshot.position + 1 - RETAIN_EVENTS, 1)
    store.close()
    for path in folder.iterdir():
        path.unlink()
