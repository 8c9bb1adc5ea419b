"""Harm to each file of a ledger, and what becomes of it: the table is the promise.

In every cell no wrong byte is served, no epoch or position goes back, no acknowledged group is queued again in silence,
no id is given twice. What is lost is named, and the rest is served; or the start is refused with a sentence.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import ConfigError, DataLoss
from services.buffer.store.base import Snapshot
from services.buffer.store.sqlite import SqliteStore
from tests.support.faults.durable_points import image
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.ledgers.ledger_history import History
from tests.support.ledgers.ledger_under_test import LedgerUnderTest
from tests.support.processes.buffer_server import BufferProcess

# `make chaos` makes 1,000 of each kind that is drawn.
NUM_DAMAGES = int(os.environ.get("HEADRACE_DAMAGES", "12"))
_LARGE_CALL_BYTES = 1_000
"""Half of the calls are files."""


class Outcome(Enum):
    """What a start may make of it."""

    WHOLE = "nothing is missing"
    NAMED = "something is missing, and named"
    REFUSED = "no start"


WHOLE, NAMED, REFUSED = Outcome


@dataclass
class Case:
    """A ledger that was killed or closed, what it was then, an older copy of it, and another ledger."""

    folder: Path
    snapshot: Snapshot
    payloads: dict[str, bytes]
    older: Path
    other: Path

    @property
    def files(self) -> dict[str, str]:
        """Its files by what they are."""
        payloads = sorted((self.folder / "payloads").iterdir(), key=lambda path: path.stat().st_size)
        return {
            "ledger.sqlite": "ledger.sqlite",
            "log": "ledger.sqlite-wal",
            "position": "position",
            "payloads": f"payloads/{payloads[-1].name}",
        }


def made(folder: Path, seed: int, *, closed: bool) -> Case:
    store = SqliteStore(folder / "run", large_call_bytes=_LARGE_CALL_BYTES)
    history = History(store, seed=seed)
    history.run(60)
    copy_log(folder / "run")
    history.run(60)
    older = image(folder / "run", folder / "older")
    copy_log(folder / "run")
    history.run(120)
    if closed:
        store.close()
    killed = image(folder / "run", folder / "killed")
    if not closed:
        store.close()
    reopened = SqliteStore(folder / "run", large_call_bytes=_LARGE_CALL_BYTES)
    snapshot = reopened.load()
    reopened.close()
    held = {r.key: history.payloads[r.key] for g in snapshot.groups for r in g.records}
    assert len(held) > 20
    return Case(killed, snapshot, held, older, Path())


def copy_log(folder: Path) -> None:
    """Into ledger.sqlite, as SQLite does now and then: commits after it are in the log alone."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        busy, pages_in_log, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert (busy, copied) == (0, pages_in_log)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("ledgers")
    other = made(folder / "other", 2, closed=False).folder
    found = {name: made(folder / name, 1, closed=name == "closed") for name in ("killed", "closed")}
    for case in found.values():
        case.other = other
    return found


Harm = Callable[[Case, Path, random.Random], None]


def flip(case: Case, file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    bit = chance.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def cut(case: Case, file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def swap(case: Case, file: Path, chance: random.Random) -> None:
    """With the file of another ledger; a payload file with another of the same."""
    others = [path for path in file.parent.iterdir() if path != file and path.suffix == file.suffix == ".payloads"]
    other = chance.choice(others) if others else case.other / file.name
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    if others:
        other.write_bytes(data)


def copy(case: Case, file: Path, chance: random.Random) -> None:
    """An older copy in its place; a payload file once more, under another name."""
    if file.suffix == ".payloads":
        shutil.copy(file, file.with_name(f"{chance.randbytes(16).hex()}.payloads"))
    else:
        shutil.copy(case.older / file.name, file)


def delete(case: Case, file: Path, chance: random.Random) -> None:
    file.unlink()


HARMS: dict[str, Harm] = {"flip": flip, "cut": cut, "swap": swap, "copy": copy, "delete": delete}
_ANY = {WHOLE, NAMED, REFUSED}
WANTED: dict[tuple[str, str, str], set[Outcome]] = {
    # A ledger that was closed: everything is in ledger.sqlite.
    ("closed", "ledger.sqlite", "flip"): _ANY,  # in a row: named; in a page's frame: refused; in unused bytes: nothing
    ("closed", "ledger.sqlite", "cut"): {NAMED, REFUSED},
    ("closed", "ledger.sqlite", "swap"): {REFUSED},
    ("closed", "ledger.sqlite", "copy"): {REFUSED},
    ("closed", "ledger.sqlite", "delete"): {REFUSED},
    # One that was killed: its end is in the log.
    ("killed", "ledger.sqlite", "flip"): _ANY,
    ("killed", "ledger.sqlite", "cut"): {WHOLE, REFUSED},
    ("killed", "ledger.sqlite", "swap"): {WHOLE, REFUSED},
    ("killed", "ledger.sqlite", "copy"): {WHOLE, REFUSED},
    ("killed", "ledger.sqlite", "delete"): {REFUSED},
    ("killed", "log", "flip"): {WHOLE, REFUSED},
    ("killed", "log", "cut"): {WHOLE, REFUSED},
    ("killed", "log", "swap"): {REFUSED},
    ("killed", "log", "copy"): {REFUSED},
    ("killed", "log", "delete"): {WHOLE, REFUSED},  # whole where SQLite had just copied all of it to ledger.sqlite
} | {
    (state, file, harm): wanted
    for state in ("closed", "killed")
    for file, harm, wanted in (
        ("payloads", "flip", {NAMED, WHOLE}),
        ("payloads", "cut", {NAMED, WHOLE}),  # whole where what was cut is dead
        ("payloads", "swap", {NAMED}),
        ("payloads", "copy", {WHOLE}),
        ("payloads", "delete", {NAMED}),
        # It only tells of what is lost elsewhere.
        ("position", "flip", {WHOLE}),
        ("position", "cut", {WHOLE}),
        ("position", "swap", {REFUSED}),
        ("position", "copy", {WHOLE}),
        ("position", "delete", {WHOLE}),
    )
}


@pytest.mark.parametrize("cell", WANTED, ids="-".join)
@pytest.mark.timeout(600 + NUM_DAMAGES)
def test_what_becomes_of_harm(cell: tuple[str, str, str], cases: dict[str, Case], tmp_path: Path) -> None:
    state, name, harm = cell
    case = cases[state]
    drawn = NUM_DAMAGES if harm in ("flip", "cut") else 1
    for number in range(drawn):
        folder = tmp_path / str(number)
        shutil.copytree(case.folder, folder)
        HARMS[harm](case, folder / case.files[name], random.Random(number))
        assert outcome(case, folder) in WANTED[cell], number
        shutil.rmtree(folder)


def outcome(case: Case, folder: Path) -> Outcome:
    """Of a start. No promise is broken, whatever it is."""
    try:
        store = SqliteStore(folder, large_call_bytes=_LARGE_CALL_BYTES)
        snapshot = store.load()
    except (DataLoss, ConfigError) as error:
        refused: str | None = error.message
    else:
        refused = None
    if refused is not None:
        assert is_told_with_the_way_out(refused, folder), refused
        return REFUSED
    before = {group.group_id: group for group in case.snapshot.groups}
    assert snapshot.position >= case.snapshot.position
    assert set(snapshot.lost_streams) <= {"train"}
    if snapshot.lost_streams:
        assert not snapshot.groups
        store.close()
        return NAMED
    assert snapshot.streams == case.snapshot.streams
    assert all(before[group.group_id] == group for group in snapshot.groups)
    assert before.keys() - {group.group_id for group in snapshot.groups} <= named_groups(store)
    is_whole = len(snapshot.groups) == len(before)
    for group in snapshot.groups:
        for record in group.records:
            try:
                (payload,) = store.read_payloads([record])
                assert payload == case.payloads[record.key]
            except DataLoss:
                is_whole = False
                assert group.group_id in named_groups(store)
    store.close()
    assert is_whole or store.damage()
    return WHOLE if is_whole and not store.damage() else NAMED


def named_groups(store: SqliteStore) -> set[str | None]:
    return {damage.group_id for damage in store.damage()}


def is_told_with_the_way_out(refused: str, folder: Path) -> bool:
    """One sentence that names the file, and the command that makes a ledger of a backup; or another headrace's."""
    if "wrote it" in refused:
        return True
    way_out = f": move {folder} away and restore a backup with `headrace buffer restore BACKUP {folder}`"
    is_one_sentence = "\n" not in refused and ". " not in refused
    return f"{folder}/ledger.sqlite" in refused and refused.endswith(way_out) and is_one_sentence


def test_a_damaged_page_costs_what_is_on_it_and_the_rest_serves(cases: dict[str, Case], tmp_path: Path) -> None:
    """Every page in turn."""
    case = cases["closed"]
    outcomes: list[Outcome] = []
    for page in range(pages_of(case.folder / "ledger.sqlite")[1]):
        folder = tmp_path / str(page)
        with_damaged_pages(case, [page], folder)
        outcomes.append(outcome(case, folder))
        shutil.rmtree(folder)
    assert outcomes.count(REFUSED) <= _NEEDED_PAGES
    assert outcomes.count(NAMED) >= 8


_NEEDED_PAGES = 7
"""Of the schema, meta and streams; those of the history that say where it begins and ends."""


def pages_of(database: Path) -> tuple[int, int]:
    """(bytes of a page, number of pages)."""
    with closing(sqlite3.connect(database)) as connection:
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return page_bytes, database.stat().st_size // page_bytes


def with_damaged_pages(case: Case, pages: Sequence[int], folder: Path) -> None:
    """A copy of the ledger, in which the second half and the number of cells of some pages are overwritten."""
    page_bytes, _ = pages_of(case.folder / "ledger.sqlite")
    shutil.copytree(case.folder, folder)
    with (folder / "ledger.sqlite").open("r+b") as file:
        for page in pages:
            file.seek(page * page_bytes + page_bytes // 2)
            file.write(b"\xff" * (page_bytes // 2))  # where cells are
            file.seek(page * page_bytes + (100 if page == 0 else 0) + 3)
            file.write(b"\x7f\x7f")  # how many there are


def test_a_salvaged_ledger_starts_after_every_kill_with_what_was_acknowledged(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    """Every third page in turn, the history's too; and two and three pages at once. `make chaos` takes every page."""
    _, num_pages = pages_of(cases["closed"].folder / "ledger.sqlite")
    every = range(3, num_pages, 3 if NUM_DAMAGES < 100 else 1)
    turns = [*((page,) for page in every), (4, num_pages - 2), (5, 6, 7)]
    num_started = 0
    for number, pages in enumerate(turns):
        folder = tmp_path / str(number)
        with_damaged_pages(cases["closed"], pages, folder)
        if refusal_of(folder) is None:
            num_started += 1
            outlives_kills(folder)
        shutil.rmtree(folder)
    assert num_started > len(turns) // 2


def outlives_kills(folder: Path) -> None:
    """Prompts that were submitted are there after two kills in a row, and what is damaged is still named."""
    submitted: set[str] = set()
    damaged: set[str] = set()
    for kill in range(2):
        refused = refusal_of(folder)
        assert refused is None, f"kill {kill}: {refused}"
        it = LedgerUnderTest(SqliteStore(folder, large_call_bytes=_LARGE_CALL_BYTES))
        assert {damage.what for damage in it.store.damage()} >= damaged
        damaged = {damage.what for damage in it.store.damage()}
        assert it.ledger.stream("train").groups.keys() >= submitted
        submitted |= set(it.submit(f"before kill {kill}"))
        killed = image(folder, folder.with_name(f"{folder.name}-killed"))
        it.store.close()
        shutil.rmtree(folder)
        killed.rename(folder)
    assert refusal_of(folder) is None


def refusal_of(folder: Path) -> str | None:
    """Why a copy of the ledger does not start; None where it does."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    try:
        store = SqliteStore(copy, large_call_bytes=_LARGE_CALL_BYTES)
        store.load()
        store.close()
    except DataLoss as error:
        return error.message
    finally:
        shutil.rmtree(copy)
    return None


def test_what_a_damaged_page_takes_is_named_by_group_and_sample(cases: dict[str, Case], tmp_path: Path) -> None:
    """Of samples, groups, prompts: each page in turn, and all pages of two tables at once."""
    case = cases["closed"]
    with closing(sqlite3.connect(case.folder / "ledger.sqlite")) as connection:
        pages: dict[str, list[int]] = {"samples": [], "groups": [], "prompts": []}
        for name, number in connection.execute("SELECT name, pageno FROM dbstat WHERE pagetype = 'leaf'"):
            if name in pages:
                pages[name].append(number - 1)
    assert all(pages.values())
    turns = [(name, [page]) for name, numbers in pages.items() for page in numbers]
    turns.append(("samples", pages["samples"] + pages["prompts"]))
    for number, (name, damaged) in enumerate(turns):
        folder = tmp_path / str(number)
        with_damaged_pages(case, damaged, folder)
        store = SqliteStore(folder, large_call_bytes=_LARGE_CALL_BYTES)
        snapshot = store.load()
        left = {group.group_id for group in snapshot.groups}
        lost = [group for group in case.snapshot.groups if group.group_id not in left]
        found = store.damage()
        store.close()
        assert {group.group_id for group in lost} <= {damage.group_id for damage in found}, (name, damaged)
        if name == "samples":
            lost_ids = {record.sample_id for group in lost for record in group.samples}
            named = {damage.sample_id for damage in found if damage.sample_id}
            assert named, damaged
            assert named <= lost_ids, damaged


async def test_a_buffer_over_a_damaged_page_keeps_what_it_acknowledged_through_kills(tmp_path: Path) -> None:
    """From outside: a page of samples is damaged while the buffer is down; then a put, a kill, and a start."""
    buffer = BufferProcess(tmp_path, None)
    await buffer.start()
    put_ids: list[str] = []
    try:
        async with BufferClient(buffer.address, deadline_seconds=60) as client:
            await client.create_stream(pb.StreamConfig(name="kept", n_samples_per_prompt=2, groups_per_step=1))
            await client.submit_prompts("kept", text_prompts(*(f"q{i}" for i in range(60))))
            leases = (await client.lease_groups("kept", "p", 40)).leases
            await client.put_groups([complete_put(lease) for lease in leases])
            assert await buffer.terminate() == 0
            database = tmp_path / "ledger" / "ledger.sqlite"
            with closing(sqlite3.connect(database)) as connection:
                leaf = "SELECT pageno FROM dbstat WHERE name = 'samples' AND pagetype = 'leaf' ORDER BY pageno LIMIT 1"
                (page,) = connection.execute(leaf).fetchone()
            with database.open("r+b") as file:
                file.seek((page - 1) * 4096)
                file.write(b"\xff" * 4096)
            for _ in range(2):
                await serves(buffer, client)
                (lease,) = (await client.lease_groups("kept", "p", 1)).leases
                put = complete_put(lease)
                await client.put_groups([put])
                put_ids += [sample.envelope.sample_id for sample in put.samples]
                assert await client.damage()
                await buffer.kill()
            await serves(buffer, client)
            assert [sample.envelope.sample_id for sample in await client.fetch_samples("kept", put_ids)] == put_ids
    finally:
        await buffer.kill()


async def serves(buffer: BufferProcess, client: BufferClient) -> None:
    """Starts it and returns when it answers; fails when it ends instead."""
    await buffer.start()
    answered, ended = asyncio.ensure_future(client.stats("kept")), asyncio.ensure_future(buffer.wait())
    await asyncio.wait({answered, ended}, return_when=asyncio.FIRST_COMPLETED)
    assert not ended.done(), buffer.log.splitlines()[-1]
    ended.cancel()
    await answered


@pytest.mark.parametrize("point", ["copied", "kept", "replaced"])
def test_a_kill_while_a_ledger_is_salvaged_leaves_one_that_starts(
    point: str, cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Nothing catches it."""

    calls = iter(("copied", "kept", "replaced"))

    def kill_at(*_: object) -> None:
        if next(calls) == point:
            image(folder, tmp_path / "killed")
            raise Killed

    folder = tmp_path / "run"
    with_damaged_pages(cases["closed"], (8,), folder)
    with monkeypatch.context() as patch:
        hardlink_to = Path.hardlink_to
        patch.setattr(Path, "hardlink_to", lambda path, target: (kill_at(), hardlink_to(path, target)))
        patch.setattr("services.buffer.store.salvage.sync", kill_at)
        with pytest.raises(Killed):
            SqliteStore(folder, large_call_bytes=_LARGE_CALL_BYTES)
    killed = tmp_path / "killed"
    store = SqliteStore(killed, large_call_bytes=_LARGE_CALL_BYTES)
    store.load()
    assert [damage.what for damage in store.damage() if "file as it was" in damage.what]
    store.close()
    assert not list(killed.glob("salvage-*"))
    outlives_kills(killed)
