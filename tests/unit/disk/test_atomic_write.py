"""A file that takes another one's place whole."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headrace.disk import atomic_write


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "curves.png"
    file.write_text("old")
    with atomic_write(file) as draft:
        draft.write_text("ne")
        assert file.read_text() == "old"
        assert draft.suffix == ".png"
        draft.write_text("new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text("old")
    with suppress(UnicodeEncodeError), atomic_write(file) as draft:
        draft.write_text("half of it")
        draft.write_text("\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
