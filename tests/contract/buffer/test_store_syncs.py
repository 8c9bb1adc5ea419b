"""What the real store asks of the real disk, and in which order: seen from the system, not from a twin."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.client.buffer import BufferClient, LargeColumn
from services.buffer.store.payload_files import DiskFiles
from services.buffer.store.sqlite import SqliteStore, connect
from tests.support.faults.durable_points import open_told
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete
from tests.support.processes.buffer_server import served_buffer


def name_of(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files and folders, in the order in which they were synced."""
    names: list[str] = []
    fsync, fdatasync = os.fsync, os.fdatasync

    def see_fsync(descriptor: int) -> None:
        fsync(descriptor)
        names.append(name_of(descriptor))

    def see_fdatasync(descriptor: int) -> None:
        fdatasync(descriptor)
        names.append(name_of(descriptor))

    monkeypatch.setattr(os, "fsync", see_fsync)
    monkeypatch.setattr(os, "fdatasync", see_fdatasync)
    return names


def test_a_put_is_synced_before_the_transaction_that_names_it(tmp_path: Path, synced: list[str]) -> None:
    store = open_told(tmp_path / "ledger", synced.append, large_call_bytes=300)
    assert synced[:2] == ["ledger", tmp_path.name]  # the names of payloads/ and of the ledger's folder
    it = LedgerUnderTest(store)
    it.create()
    it.submit("a", "b", "c", "d")
    groups = it.lease(2)
    synced.clear()
    it.put(groups[:1])
    assert synced == ["commit", "committed"]  # its payloads are in the rows
    synced.clear()
    it.do(it.ledger.put(it.now, [complete(groups[1], text="x" * 300)]))
    (file,) = os.listdir(tmp_path / "ledger" / "payloads")
    assert synced == [
        "create", "created", "write", "half-written", "written", file, "synced", "payloads", "folder-synced",
        "commit", "committed",
    ]  # fmt: skip
    synced.clear()
    it.do(it.ledger.drop(it.now, "train", "dropped", [groups[1].group_id], "poison"))
    assert synced == ["commit", "committed", "delete", "deleted"]
    store.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 5 << 20], ids=["empty", "one byte", "several pieces"])
async def test_an_uploaded_column_and_its_name_are_synced_before_the_answer(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    rename = os.rename

    def see_rename(old: Path, new: Path) -> None:
        synced.append(f"{Path(old).name} becomes {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "rename", see_rename)
    data = bytes(num_bytes)
    name = hashlib.sha256(data).hexdigest()
    store = SqliteStore(tmp_path / "ledger")
    columns = tmp_path / "columns"
    async with served_buffer(store, columns_folder=columns) as (_, server), BufferClient(server.address) as client:
        synced.clear()
        await client.upload_column(LargeColumn(bytes.fromhex(name), data))
        assert synced == [f"{name}.part", f"{name}.part becomes {name}", "columns"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    """Its log is synced by the real system call between two answers; a connection that forgot FULL would not."""
    program = (
        "from pathlib import Path\n"
        "from services.buffer.store.sqlite import SqliteStore\n"
        "from tests.support.ledgers.ledger_under_test import LedgerUnderTest\n"
        "import os, sys\n"
        f"it = LedgerUnderTest(SqliteStore(Path({str(tmp_path / 'ledger')!r})))\n"
        "it.create()\n"
        "for i in range(20): it.submit(f'q{i}'); os.write(1, b'answered\\n')\n"
    )
    trace = tmp_path / "trace"
    watched = [
        "strace",
        "-f",
        "-y",
        "-e",
        "trace=fsync,fdatasync,write",
        "-o",
        str(trace),
        sys.executable,
        "-c",
        program,
    ]
    subprocess.run(watched, check=True, capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    told = [line for line in trace.read_text().splitlines() if "sync(" in line or '"answered' in line]
    answers = [i for i, line in enumerate(told) if '"answered' in line]
    assert len(answers) == 20
    for before, after in pairwise(answers):
        assert any("ledger.sqlite-wal" in line for line in told[before:after])


def test_sqlite_is_told_to_sync_every_commit(tmp_path: Path) -> None:
    connections: list[sqlite3.Connection] = []

    def connect_seen(path: Path) -> sqlite3.Connection:
        connections.append(connect(path))
        return connections[-1]

    store = SqliteStore(tmp_path, connect_writer=connect_seen)
    (writer,) = connections
    assert writer.execute("PRAGMA synchronous").fetchone() == (2,)
    assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: writev(descriptor, [b"".join(parts)[:7]]))
    files = DiskFiles(tmp_path)
    files.create("file")
    files.write("file", [b"0123", b"456789", b"abc"])
    assert files.read("file", 0, 100) == b"0123456789abc"
