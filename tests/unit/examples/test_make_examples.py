"""`make examples`: every README's first block is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import examples


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two examples, the first of which fails; what runs writes into files beside the folder."""
    seen = tmp_path / "seen"
    seen.mkdir()
    for name, line in (("bad", "false"), ("good", "headrace --help >help")):
        folder = tmp_path / "examples" / name
        folder.mkdir(parents=True)
        text = f"# {name}\n\n```bash\n{line}\necho $HEADRACE_NUM_ROLLOUT >{seen}/{name}\n```\n\n```bash\nexit 9\n```\n"
        (folder / "README.md").write_text(text)
    monkeypatch.setattr(examples, "EXAMPLES", tmp_path / "examples")
    return seen


def test_all_are_run_a_few_steps_long_although_one_fails(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examples.main(["--steps", "2"]) == 1
    assert {path.name: path.read_text() for path in written.iterdir()} == {"good": "2\n"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[-2:]] == ["failed", "ok"]


def test_one_is_run_alone_and_an_unknown_one_is_refused(written: Path) -> None:
    assert examples.main(["good"]) == 0
    with pytest.raises(SystemExit):
        examples.main(["ugly"])
