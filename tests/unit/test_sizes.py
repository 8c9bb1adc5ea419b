"""The gate of `make lint` that bounds the lines of a file."""

from __future__ import annotations

from pathlib import Path

from tools.sizes import MOST_LINES, ROOT, main, too_long


def test_a_file_above_the_limit_is_named_and_one_at_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "full.py").write_text("\n" * MOST_LINES)
    (tmp_path / "services" / "longer.py").write_text("\n" * (MOST_LINES + 1))
    assert [line.split(":")[0] for line in too_long(tmp_path)] == ["services/longer.py"]
    assert main(tmp_path) == 1


def test_the_project_is_within_the_limit() -> None:
    assert main(ROOT) == 0
