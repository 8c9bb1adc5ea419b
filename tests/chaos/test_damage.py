"""Bits of the ledger's files turn, files lose their end: each is noticed, no wrong byte is served, the rest is."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.errors import DataLoss
from services.buffer.group import Group
from services.buffer.store.base import Snapshot
from services.buffer.store.segment_record import Damage, Record, RecordType, scan
from services.buffer.store.segment_rows import load_rows
from services.buffer.store.segments import SegmentStore
from tests.support.ledger_history import History
from tests.support.power_loss import Image, MemoryFiles

# `make chaos` makes 10,000.
NUM_DAMAGES = int(os.environ.get("HEADRACE_DAMAGES", "60"))
SEGMENT_BYTES = 16 << 10


@dataclass
class Ledger:
    """A closed ledger: its files, and what they hold."""

    segments: Image
    index: bytes
    snapshot: Snapshot
    payloads: dict[str, bytes]
    """Held by groups, by key."""
    victims: dict[str, list[tuple[int, set[str]]]]
    """By file: where each record ends, and the groups and samples that go with it."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    folder, files = tmp_path_factory.mktemp("ledger"), MemoryFiles({})
    store = SegmentStore(folder, segment_bytes=SEGMENT_BYTES, open_files=lambda _: files)
    history = History(store)
    history.run(250)
    store.close()
    image = {name: bytes(data) for name, data in files.contents.items()}
    (folder / "index").write_bytes((folder / "index.sqlite").read_bytes())
    reopened = open_store(image, folder, keep_index=True)
    snapshot = reopened.load()
    reopened.close()
    held = {r.key: history.payloads[r.key] for g in snapshot.groups for r in g.records}
    assert len(held) > 20
    return Ledger(image, (folder / "index").read_bytes(), snapshot, held, {n: victims(n, d) for n, d in image.items()})


def victims(name: str, data: bytes) -> list[tuple[int, set[str]]]:
    found: list[tuple[int, set[str]]] = []
    keys: list[str] = []
    for record in scan(data, int(name[9:17], 16)):
        assert isinstance(record, Record)
        lost: set[str] = set()
        if record.type is RecordType.TRANSACTION:
            rows = load_rows(record.body)
            keys = [row.key for row in rows.samples if row.payload_bytes is not None]
            lost = {row.group_id for row in (*rows.groups, *rows.prompts)} | {row.key for row in rows.samples}
        elif record.type is RecordType.PAYLOAD:
            lost = {keys.pop(0)}
        found.append((record.end, lost))
    return found


def open_store(image: Image, folder: Path, *, keep_index: bool) -> SegmentStore:
    return SegmentStore(
        folder, segment_bytes=SEGMENT_BYTES, keep_index=keep_index, open_files=lambda _: MemoryFiles(image)
    )


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def serve(store: SegmentStore, ledger: Ledger) -> set[str]:
    """Keys of the payloads that are there, every one as it was put; no group is other than it was."""
    snapshot = store.load()
    groups = {g.group_id: g for g in ledger.snapshot.groups}
    assert all(groups[g.group_id] == g for g in snapshot.groups)
    assert snapshot.streams == ledger.snapshot.streams
    served: set[str] = set()
    for record in (r for g in snapshot.groups for r in g.records):
        try:
            (payload,) = store.read_payloads([record])
        except DataLoss:
            continue
        assert payload == ledger.payloads[record.key]
        served.add(record.key)
    return served


def each(count: int, act: Callable[[random.Random, int], None]) -> None:
    for number in range(count):
        act(random.Random(number), number)


def names(group: Group) -> set[str]:
    """What a record can hold of it."""
    return {group.group_id, *(r.key for r in (*group.samples, *group.partials))}


@pytest.mark.timeout(600 + NUM_DAMAGES)
def test_every_bit_that_turns_in_a_segment_is_noticed_when_the_index_is_made_again(
    ledger: Ledger, tmp_path: Path
) -> None:
    def turn_one(chance: random.Random, number: int) -> None:
        name = chance.choice(sorted(ledger.segments))
        bit = chance.randrange(len(ledger.segments[name]) * 8)
        lost = next(lost for end, lost in ledger.victims[name] if bit // 8 < end)
        image = {**ledger.segments, name: flipped(ledger.segments[name], bit)}
        store = open_store(image, tmp_path / str(number), keep_index=False)
        snapshot = store.load()
        assert snapshot.num_damaged or snapshot.torn_bytes
        touched = {r.key for g in ledger.snapshot.groups if lost & names(g) for r in g.records}
        assert serve(store, ledger) >= ledger.payloads.keys() - touched
        store.close()

    each(NUM_DAMAGES, turn_one)


@pytest.mark.timeout(600 + NUM_DAMAGES)
def test_with_its_index_a_ledger_loses_the_damaged_payload_and_nothing_else(ledger: Ledger, tmp_path: Path) -> None:
    def damage_one(chance: random.Random, number: int) -> None:
        name = chance.choice(sorted(ledger.segments))
        data = ledger.segments[name]
        bit, cut = chance.randrange(len(data) * 8), chance.randrange(len(data))
        is_cut = number % 2 == 0
        image = {**ledger.segments, name: data[:cut] if is_cut else flipped(data, bit)}
        damaged = [lost for (end, lost) in ledger.victims[name] if (cut < end if is_cut else bit // 8 < end)][
            : None if is_cut else 1
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "index.sqlite").write_bytes(ledger.index)
        store = open_store(image, folder, keep_index=True)
        assert {g.group_id for g in store.load().groups} == {g.group_id for g in ledger.snapshot.groups}
        served = serve(store, ledger)
        lost = set().union(*(one for one in damaged if len(one) == 1)) & ledger.payloads.keys()  # PAYLOAD records
        assert served == ledger.payloads.keys() - lost
        store.close()

    each(NUM_DAMAGES, damage_one)


@pytest.mark.timeout(600 + NUM_DAMAGES)
def test_an_index_that_is_damaged_is_made_again(ledger: Ledger, tmp_path: Path) -> None:
    def damage_index(chance: random.Random, number: int) -> None:
        cut = chance.randrange(len(ledger.index))
        damaged = flipped(ledger.index, cut * 8 + 3) if number % 2 else ledger.index[:cut]
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "index.sqlite").write_bytes(damaged)
        store = open_store(ledger.segments, folder, keep_index=True)
        assert serve(store, ledger) == ledger.payloads.keys()
        assert {g.group_id for g in store.load().groups} == {g.group_id for g in ledger.snapshot.groups}
        assert store.load().position == ledger.snapshot.position
        store.close()

    each(NUM_DAMAGES // 4, damage_index)


def test_bytes_that_a_producer_put_are_never_taken_for_a_record(ledger: Ledger) -> None:
    name, data = next(iter(ledger.segments.items()))
    forged = b"\1" + data  # whole records of another segment inside of a payload
    assert all(isinstance(item, Damage) for item in scan(forged, int(name[9:17], 16) + 1))
