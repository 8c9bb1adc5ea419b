"""A reward service by itself: written, tested by its own tests, served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main


def test_a_new_reward_service_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reward", "new", "mine"]) == 0
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd="mine", env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["reward", "new", "mine"]) == 1


@pytest.mark.parametrize(
    "words", [["nonsense.py:fn"], ["maths"], ["math", "--frobnicate", "1"], ["math", "--address", "x"]]
)
def test_what_cannot_be_served_is_refused(words: list[str], tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "headrace"), "reward", "serve", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert words[-1] in done.stderr or words[0] in done.stderr
