"""A kill at every durable operation of a ledger loses nothing, nor does another kill in the start behind it.

Folders as a kill leaves them are opened, with kills at drawn points, are opened again, and read bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from services.buffer.store.sqlite import SqliteStore
from tests.support.faults.durable_points import image, open_told
from tests.support.ledgers.ledger_history import History, Moment

NUM_COMMANDS = 160
# `make chaos` cuts at every point.
NUM_IMAGES = os.environ.get("HEADRACE_KILL_IMAGES", "24")
_LARGE_CALL_BYTES = 1_000
"""Half of the calls are files."""


@pytest.mark.timeout(600 + 20 * NUM_COMMANDS)
def test_a_kill_at_any_operation_and_one_in_the_start_behind_it_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    points: list[str] = []
    images: list[tuple[Path, str, int]] = []
    share = 1.0 if NUM_IMAGES == "every" else int(NUM_IMAGES) / (4 * NUM_COMMANDS)

    def on_point(name: str) -> None:
        points.append(name)
        if chance.random() < share and history:
            target = image(tmp_path / "run", tmp_path / f"image-{len(points)}")
            images.append((target, name, len(history[0].moments)))

    history: list[History] = []
    store = open_told(tmp_path / "run", on_point, large_call_bytes=_LARGE_CALL_BYTES)
    history.append(History(store, retain_events=200))
    for _ in range(NUM_COMMANDS):
        history[0].step()
    store.close()
    assert {"create", "half-written", "synced", "folder-synced", "commit", "committed", "delete"} <= set(points)
    for number, (folder, name, num_answered) in enumerate(images):
        follow(history[0], folder, num_answered, random.Random(number), name)
    print(f"{len(images)} of {len(points)} points of {NUM_COMMANDS} commands, another kill behind each")


def follow(history: History, folder: Path, num_answered: int, chance: random.Random, name: str) -> None:
    """Opens what the kill left, and is killed again while it starts."""
    again, passed, killed_at = folder.with_name(f"{folder.name}-again"), 0, chance.randrange(1, 4)

    def on_point(_: str) -> None:
        nonlocal passed
        passed += 1
        if passed == killed_at:
            image(folder, again)

    store = open_told(folder, on_point, large_call_bytes=_LARGE_CALL_BYTES)
    check(history, store, num_answered, name)
    store.close()
    if again.exists():
        store = SqliteStore(again, large_call_bytes=_LARGE_CALL_BYTES)
        check(history, store, num_answered, name)
        store.close()
        shutil.rmtree(again)
    shutil.rmtree(folder)


def check(history: History, store: SqliteStore, num_answered: int, name: str) -> None:
    """It is one moment of the run, none before what was answered, and every payload is there, bit for bit."""
    snapshot = store.load()
    assert store.damage() == [], name
    later: list[Moment] = history.moments[max(num_answered - 1, 0) :]
    assert any(moment.equals(snapshot) for moment in later), name
    for group in snapshot.groups:
        assert list(map(bytes, store.read_payloads(group.records))) == [history.payloads[r.key] for r in group.records]
