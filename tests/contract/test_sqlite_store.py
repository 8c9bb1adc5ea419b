"""The store in a folder: SQLite for the rows, append-only files for the payloads."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.config.job import BufferSection
from headrace.errors import ConfigError, DataLoss
from services.buffer.store.base import Damage
from services.buffer.store.kinds import open_store
from services.buffer.store.sqlite.store import SqliteStore
from tests.contract.test_buffer_stores import busy_ledger


def test_a_folder_of_the_segment_store_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    with pytest.raises(ConfigError, match="buffer_store segments, which this headrace does not read: finish the run"):
        open_store(BufferSection(), tmp_path, "run")


def test_the_segment_store_is_refused_by_a_sentence_that_names_sqlite() -> None:
    with pytest.raises(ValueError, match="set buffer_store to sqlite"):
        BufferSection.model_validate({"buffer_store": "segments"})
    assert BufferSection().buffer_store == "sqlite"


def damage(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database, database:
        assert database.execute(statement).rowcount == 1


def test_promise_9_a_damaged_group_is_set_aside_and_named_and_the_others_are_loaded(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    damage(tmp_path, "UPDATE groups SET crc = crc + 1 WHERE group_id = 'train/5'")
    it.store.close()
    it.store = SqliteStore(tmp_path)
    it.store.load()
    assert it.store.damage() == [Damage("the row groups/train/5 is damaged", "train/5")]
    it.restart()
    assert len(it.ledger.book("train").groups) == 11


def test_promise_9_a_batch_that_lost_a_group_is_data_loss_and_not_a_smaller_batch(tmp_path: Path) -> None:
    it = busy_ledger(SqliteStore(tmp_path))
    victim = it.batch(2, 1).groups[0].group_id
    damage(tmp_path, f"UPDATE groups SET crc = crc + 1 WHERE group_id = '{victim}'")
    it.restart()
    with pytest.raises(DataLoss, match="1 of the 2 groups in the batch of step 1"):
        it.batch(2, 1)


def test_two_processes_cannot_have_one_data_dir(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    with pytest.raises(ConfigError, match="in use by another buffer"):
        SqliteStore(tmp_path)
    store.close()
    SqliteStore(tmp_path).close()
