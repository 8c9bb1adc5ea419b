"""`headrace env` where verifiers is not installed: the other Python, the settings, the agent host that waits.

tests/contract/test_verifiers.py has the package itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.commands import env as command
from headrace.cli.main import main
from headrace.errors import InvalidArgument
from headrace.run_folder import RunFolder, ServiceEntry

HERE = pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
PYTHON = """#!/bin/sh
echo "$@" >>{calls}
for word; do case $word in *.jsonl) echo '{{"prompt": "2 + 2?"}}' >$word ;; esac; done
[ "$2" = headrace.cli.commands.env ] && exec sleep 60
exit {code}
"""


def stand_in(folder: Path, code: int = 0) -> Path:
    """A Python that writes the rows it is asked for, and notes what it was asked."""
    python = folder / "python"
    python.write_text(PYTHON.format(calls=folder / "calls", code=code))
    python.chmod(0o755)
    return python


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@HERE
@pytest.mark.parametrize("words", [["list"], ["export", "sums", "--out", "rows.jsonl"]])
def test_without_verifiers_the_way_to_it_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", *words]) == 1
    assert "requirements/verifiers.txt" in capsys.readouterr().err


def test_another_python_lists_and_exports(tmp_path: Path) -> None:
    python = stand_in(tmp_path, code=1)
    assert main(["env", "list", "--json", "--python", str(python)]) == 1
    words = ["--set", "taskset.size=3", "--limit", "4"]
    assert main(["env", "export", "sums", "--out", "rows.jsonl", *words, "--python", str(python)]) == 1
    assert calls(tmp_path) == [
        "-m headrace.cli.main env list --json",
        "-m headrace.cli.main env export sums --out rows.jsonl --set taskset.size=3 --limit 4",
    ]


def test_a_python_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--python", "/nowhere/python"]) == 1
    assert "/nowhere/python" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each `headrace train`, which is not run."""
    words: list[list[str]] = []
    monkeypatch.setattr(command, "train_words", lambda given: words.append(list(given)) or 0)
    return words


def test_train_writes_the_rows_once_and_starts_a_host_that_ends_with_it(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    python, hosts = stand_in(tmp_path), list[Any]()
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: hosts.append(started(*args, **more)) or hosts[-1])
    for _ in range(2):
        words = ["train", "sums", str(job_file), "--num-rollout", "2", "--python", str(python)]
        assert main(["env", *words]) == 0
    assert [call for call in calls(tmp_path) if " export " in call] == [
        "-m headrace.cli.main env export sums --out sums.jsonl"
    ]
    assert json.loads(Path("sums.jsonl").read_text()) == {"prompt": "2 + 2?"}
    for words in trained:
        assert words[:3] == [str(job_file), "--num-rollout", "2"]
        assert words[3:5] == ["--prompt-data", "sums.jsonl"]
        assert "--agent-hosts" in words
    assert all(host.returncode is not None for host in hosts)


def test_train_ends_where_the_rows_cannot_be_written(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_there", lambda python, words: 2)
    assert main(["env", "train", "sums", str(job_file)]) == 2
    assert not trained


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        ([], {}),
        (["taskset.size=3", "taskset.game=Hangman-v0"], {"taskset": {"size": 3, "game": "Hangman-v0"}}),
        (["a.b.c=[1, 2]", "a.d=null", "e="], {"a": {"b": {"c": [1, 2]}, "d": None}, "e": ""}),
    ],
)
def test_settings_become_a_tree(settings: list[str], tree: dict[str, Any]) -> None:
    assert command._tree(settings) == tree


@pytest.mark.parametrize("settings", [["taskset.size"], ["=3"], ["taskset.=3"], ["a=1", "a.b=2"]])
def test_a_setting_that_is_none_is_refused(settings: list[str], tmp_path: Path) -> None:
    words = [word for each in settings for word in ("--set", each)]
    with pytest.raises(InvalidArgument):
        command._tree(settings)
    assert main(["env", "export", "sums", "--out", str(tmp_path / "a.jsonl"), *words]) in (1, 2)


def test_a_host_whose_starter_has_ended_does_not_wait(tmp_path: Path) -> None:
    assert command.wait_for(RunFolder(tmp_path), starter=0) is False


def test_a_host_begins_once_the_rollout_service_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([False, True])

    async def serves(address: str) -> bool:
        return next(asked)

    run = RunFolder(tmp_path)
    run.write_services({"rollout": ServiceEntry("127.0.0.1:1", None, os.getpid())})
    monkeypatch.setattr(command, "is_serving", serves)
    assert command.wait_for(run, os.getppid()) is True


def test_a_host_is_a_program(tmp_path: Path) -> None:
    host = subprocess.Popen([sys.executable, "-m", "headrace.cli.commands.env", str(tmp_path)])
    host.terminate()
    assert host.wait(60) != 0
