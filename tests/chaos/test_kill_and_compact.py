"""A kill at every durable operation, a compaction, a kill inside of that one, and again: no payload is lost.

Folders as a kill leaves them are opened, compacted with kills at drawn points, opened again, and read bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.buffer.store.sqlite.store import SqliteStore
from tests.support.faults.durable_points import image, open_told
from tests.support.ledgers.ledger_history import History, Moment

NUM_COMMANDS = 160
# `make chaos` cuts at every point.
NUM_IMAGES = os.environ.get("HEADRACE_KILL_IMAGES", "24")
_CHAIN = 3
"""Restarts with a compaction between them, after the first kill."""
_FILE_BYTES = 4096


@pytest.mark.timeout(600 + 20 * NUM_COMMANDS)
def test_a_kill_at_any_operation_and_in_the_compactions_after_it_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    points: list[str] = []
    images: list[tuple[Path, str, int]] = []
    every = NUM_IMAGES == "every"
    share = 1.0 if every else int(NUM_IMAGES) / (4 * NUM_COMMANDS)

    def on_point(name: str) -> None:
        points.append(name)
        if chance.random() < share and history:
            target = image(tmp_path / "run", tmp_path / f"image-{len(points)}")
            images.append((target, name, len(history[0].moments)))

    history: list[History] = []
    store = open_told(tmp_path / "run", on_point)
    history.append(History(store, retain_events=200))
    for _ in range(NUM_COMMANDS):
        history[0].step()
        store.compact()
    store.close()
    assert {"create", "half-written", "synced", "folder-synced", "commit", "committed", "delete"} <= set(points)
    for number, (folder, name, num_answered) in enumerate(images):
        follow(history[0], folder, num_answered, random.Random(number), name)
    print(f"{len(images)} of {len(points)} points of {NUM_COMMANDS} commands, {_CHAIN} compactions behind each")


def follow(history: History, folder: Path, num_answered: int, chance: random.Random, name: str) -> None:
    for _ in range(_CHAIN):
        killed_at = chance.randrange(40)
        with killed(folder, killed_at) as store:
            check(history, store, num_answered, name)
            while store.compact():
                pass
    store = SqliteStore(folder, file_bytes=_FILE_BYTES)
    check(history, store, num_answered, name)
    store.close()
    shutil.rmtree(folder)


@contextmanager
def killed(folder: Path, point: int) -> Iterator[SqliteStore]:
    """The folder is afterwards as a kill at that point of the work would leave it."""
    left: list[Path] = []
    passed = 0

    def on_point(_: str) -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            left.append(image(folder, folder.with_name(f"{folder.name}-left")))

    store = open_told(folder, on_point)
    yield store
    store.close()
    if left:
        shutil.rmtree(folder)
        left[0].rename(folder)


def check(history: History, store: SqliteStore, num_answered: int, name: str) -> None:
    """It is one moment of the run, none before what was answered, and every payload is there, bit for bit."""
    snapshot = store.load()
    assert store.damage() == [], name
    later: list[Moment] = history.moments[max(num_answered - 1, 0) :]
    assert any(moment.equals(snapshot) for moment in later), name
    for group in snapshot.groups:
        assert list(map(bytes, store.read_payloads(group.records))) == [history.payloads[r.key] for r in group.records]
