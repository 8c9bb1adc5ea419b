"""Payload files by themselves: what is wrong with one is said, and a record is the one that was asked for, or none."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace import __version__
from headrace.errors import ConfigError
from services.buffer.store.files import DiskFiles
from services.buffer.store.sqlite.database import checksum, connect, note_version, open_database
from services.buffer.store.sqlite.payload_files import PayloadFiles, file_name
from services.buffer.store.sqlite.payload_record import read_record, record_header

FILE_ID = bytes(range(16))


def test_more_parts_than_one_call_of_the_system_takes_lie_one_after_the_other(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.create("file")
    parts = [str(i % 10).encode() for i in range(2_500)]
    files.write("file", 0, parts)
    assert files.read("file", 0, 3_000) == b"".join(parts)


def test_what_is_free_is_in_bytes(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    assert files.free_bytes() % 512 == 0
    assert files.free_bytes() > 16 << 20, "in blocks it would be less"


def test_a_file_that_is_short_or_begins_otherwise_is_said_to_be_damaged(tmp_path: Path) -> None:
    files = PayloadFiles(DiskFiles(tmp_path), 1 << 20)
    (extent,) = files.append([[("key", b"payload")]])
    path = tmp_path / file_name(extent.file_id)
    whole = path.read_bytes()
    assert files.damage_of(extent.file_id, extent.end) is None
    path.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, and had {len(whole)}" in str(files.damage_of(extent.file_id, extent.end))
    path.write_bytes(b"x" + whole[1:])
    assert "another file's header" in str(files.damage_of(extent.file_id, extent.end))


@pytest.mark.parametrize("place", [0, 4, 8, 16])
def test_a_record_whose_header_or_key_differs_is_none(place: int) -> None:
    header, crc = record_header(FILE_ID, b"key", b"payload")
    record = bytearray(header + b"payload")
    assert bytes(read_record(memoryview(record), FILE_ID, b"key", 7, crc) or b"") == b"payload"
    record[place] ^= 1
    assert read_record(memoryview(record), FILE_ID, b"key", 7, crc) is None


def test_a_database_of_a_newer_release_is_refused_by_that_releases_name_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(open_database(path, connect, may_be_new=True)) as database:
        note_version(database)
        assert database.execute("SELECT body FROM meta WHERE key = 'headrace'").fetchone() == (__version__.encode(),)
        body = b"9.1.0"
        database.execute("UPDATE meta SET body = ?, crc = ?", (body, checksum("headrace", body)))
        database.execute("PRAGMA user_version = 9")
    before = path.read_bytes()
    with pytest.raises(
        ConfigError, match=r"has layout 9 of headrace 9\.1\.0.*nothing was changed. Go on with headrace 9"
    ):
        open_database(path, connect, may_be_new=False)
    assert path.read_bytes() == before


def test_a_database_of_another_layout_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    open_database(path, connect, may_be_new=True).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(
        ConfigError, match=r"has layout 2 of an older headrace.*reads layout 3.*or choose another run_name"
    ):
        open_database(path, connect, may_be_new=False)
