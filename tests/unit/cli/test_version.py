"""`headrace --version`, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from headrace.cli.main import main


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sa", "samples"),
        ("buffer dr", "drop"),
        ("rollout sc", "scale"),
        ("samples --ev", "--eval"),
        ("train job.toml --max-stal", "--max-staleness"),
        ("check hook --ki", "--kind"),
        ("status b", "bench-1"),
    ],
)
def test_a_shell_completes_commands_options_flags_and_runs(
    typed: str, completed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/bench-1").mkdir(parents=True)
    (tmp_path / "runs/bench-1/services.json").touch()
    words = ["headrace", *typed.split()]
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_HEADRACE_COMPLETE", "bash_complete")
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [f"plain,{completed}"]


def test_a_shell_gets_its_script_for_completion() -> None:
    command = [sys.executable, "-m", "headrace.cli.main"]
    environment = {**os.environ, "_HEADRACE_COMPLETE": "zsh_source"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "#compdef headrace" in done.stdout
