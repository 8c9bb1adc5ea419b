"""The gate of docs/flags.md: a flag without a test does not pass, nor a test that is gone or names another flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.job.option import options
from tools.flags import described, main, mistakes

LR = [options()["lr"]]


def written(folder: Path, text: str) -> Path:
    (folder / "test_a.py").write_text(text)
    return folder


def test_the_page_is_what_the_flags_and_their_tests_say() -> None:
    assert main([]) == 0


def test_a_flag_without_a_test_is_refused() -> None:
    assert mistakes(LR, {}) == ["--lr has no test: name the one that shows what it does in tests/flags.toml"]


def test_a_new_option_without_a_test_fails_the_gate_as_make_lint_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = described()
    monkeypatch.setattr("tools.flags.described", lambda: [*flags, replace(flags[0], name="brand_new")])
    assert main([]) == 1
    assert "--brand-new has no test" in capsys.readouterr().out


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


def test_what_is_no_flag_leaves_the_table() -> None:
    assert mistakes([], {"lr": "test_a.py::test_it"}) == ["tests/flags.toml names lr, which is no flag"]
