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


TEST = "def test_it():\n    run('--lr', '1')\n"
GATED = {
    "a mark": "import os\n@pytest.mark.skipif('LONG' not in os.environ, reason='long')\n" + TEST,
    "a mark over others": "@pytest.mark.skipif(not os.getenv('LONG'), reason='long')\n@pytest.mark.ranks\n" + TEST,
    "a constant": "KINDS = environ.get('KINDS', '').split()\n@pytest.mark.skipif('disk' not in KINDS, reason='')\n"
    + TEST,
    "a constant of a constant": (
        "SIZE = int(os.environ.get('SIZE', '0'))\nLONG = SIZE > 1\n@pytest.mark.skipif(not LONG, reason='')\n" + TEST
    ),
    "a named mark": "long = pytest.mark.skipif('LONG' not in os.environ, reason='')\n@long\n" + TEST,
    "an imported mark": "from tests.marks import whole\n@whole\n" + TEST,
    "an imported mark with another name": "from tests.marks import whole as slow\n@slow\nasync " + TEST,
    "a mark of the module": "from tests.marks import whole\npytestmark = [pytest.mark.e2e, whole]\n" + TEST,
    "its body": TEST + "    if 'LONG' not in os.environ:\n        pytest.skip('long')\n",
    "a fixture": "@pytest.fixture\ndef image():\n    os.getenv('IMAGE') or pytest.skip('none')\n"
    + TEST.replace("()", "(image)", 1),
    "the module": "if not os.environ.get('LONG'):\n    pytest.skip('long', allow_module_level=True)\n" + TEST,
}
RUN = {
    "a skip for another reason": "@pytest.mark.skipif(sys.platform != 'linux', reason='')\n" + TEST,
    "a variable without a skip": "import os\nos.environ['A'] = '1'\n" + TEST,
    "one parameter that is long": (
        "from tests.marks import whole\n"
        "@pytest.mark.parametrize('n', [1, pytest.param(9, marks=whole)])\n" + TEST.replace("()", "(n)", 1)
    ),
    "a long test beside it": "from tests.marks import whole\n@whole\ndef test_other():\n    pass\n" + TEST,
    "a number that a variable makes larger": (
        "N = int(os.environ.get('N', '3'))\n@pytest.mark.timeout(100 * N)\n" + TEST
    ),
    "an imported mark of another kind": "from tests.marks import needs_root\n@needs_root\n" + TEST,
}
MARKS = """
ALL = os.environ.get("ALL") == "all"
whole = pytest.mark.skipif(not ALL, reason="long")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may")
"""


@pytest.mark.parametrize("text", GATED.values(), ids=GATED)
def test_a_test_that_waits_for_an_environment_variable_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "marks.py").write_text(MARKS)
    (found,) = mistakes(LR, {"lr": "test_a.py::test_it"}, root=written(tmp_path, text)) or ["taken"]
    assert "lr is shown by test_a.py::test_it, which `make test` skips" in found


@pytest.mark.parametrize("text", RUN.values(), ids=RUN)
def test_a_test_that_runs_without_an_environment_variable_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "marks.py").write_text(MARKS)
    assert mistakes(LR, {"lr": "test_a.py::test_it"}, root=written(tmp_path, text)) == []


def test_what_is_no_flag_leaves_the_table() -> None:
    assert mistakes([], {"lr": "test_a.py::test_it"}) == ["tests/flags.toml names lr, which is no flag"]
