"""The files of large calls by themselves, and the layouts of `ledger.sqlite` that are refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace import __version__
from headrace.errors import ConfigError
from services.buffer.store.payload_files import DiskFiles
from services.buffer.store.salvage import write_meta
from services.buffer.store.sqlite import SqliteStore


def test_more_parts_than_one_call_of_the_system_takes_lie_one_after_the_other(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.create("file")
    parts = [str(i % 10).encode() for i in range(2_500)]
    files.write("file", parts)
    assert files.read("file", 0, 3_000) == b"".join(parts)


def test_what_is_free_is_in_bytes(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    assert files.free_bytes() % 512 == 0
    assert files.free_bytes() > 16 << 20, "in blocks it would be less"


@pytest.mark.parametrize(("layout", "writer"), [(9, "headrace 9.1.0"), (2, "an older headrace")])
def test_a_database_of_another_layout_is_refused_by_its_releases_name_and_left_as_it_was(
    tmp_path: Path, layout: int, writer: str
) -> None:
    SqliteStore(tmp_path).close()
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        (body,) = database.execute("SELECT body FROM meta WHERE key = 'headrace'").fetchone()
        assert body == __version__.encode()
        if layout == 9:
            write_meta(database, "headrace", "9.1.0")
        else:
            database.execute("DELETE FROM meta WHERE key = 'headrace'")
        database.execute(f"PRAGMA user_version = {layout}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"layout {layout} of {writer}.* nothing was changed. .*another run_name"):
        SqliteStore(tmp_path)
    assert path.read_bytes() == before
