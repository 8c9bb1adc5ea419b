"""The gate of docs/flags.md: a flag without a test does not pass, nor a test that is gone or names another flag."""

from __future__ import annotations

from pathlib import Path

from headrace.config.leaf import leaves
from tools.flags import main, mistakes

LR = [leaves()["lr"]]


def written(folder: Path, text: str) -> Path:
    (folder / "test_a.py").write_text(text)
    return folder


def test_the_page_is_what_the_flags_and_their_tests_say() -> None:
    assert main([]) == 0


def test_a_flag_without_a_test_is_refused_unless_it_is_known_to_have_none() -> None:
    assert mistakes(LR, {}) == ["--lr has no test: name the one that shows what it does in tests/flags.toml"]
    assert mistakes(LR, {}, ["lr"]) == []


def test_a_test_that_names_its_flag_is_taken(tmp_path: Path) -> None:
    root = written(tmp_path, "def test_it():\n    run('--lr', '1')\n")
    assert mistakes(LR, {"lr": "test_a.py::test_it"}, root=root) == []


def test_a_test_that_is_gone_or_names_another_flag_is_refused(tmp_path: Path) -> None:
    root = written(tmp_path, "def test_it():\n    run('--lr-decay-style')\n")
    for test, why in (
        ("test_b.py::test_it", "and there is no such file"),
        ("test_a.py::test_other", "and there is no such test"),
        ("test_a.py::test_it", "which does not name it"),
    ):
        assert mistakes(LR, {"lr": test}, root=root) == [f"tests/flags.toml: lr is shown by {test}, {why}"]


def test_what_is_no_flag_and_what_has_a_test_leave_the_lists(tmp_path: Path) -> None:
    root = written(tmp_path, "def test_it():\n    lr\n")
    assert mistakes([], {"lr": "test_a.py::test_it"}) == ["tests/flags.toml names lr, which is no flag"]
    (said,) = mistakes(LR, {"lr": "test_a.py::test_it"}, ["lr"], root)
    assert said.endswith("take it out of without_test")
