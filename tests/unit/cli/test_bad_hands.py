"""What a person can get wrong at a command ends in one sentence and a code that is not 0: never in a traceback."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import runs
from headrace.cli.main import main
from headrace.errors import FailedPrecondition
from headrace.launch.launcher import Launcher
from headrace.run_folder import RunFolder, ServiceEntry


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(words)
    said = capsys.readouterr()
    assert code not in (0, None)
    assert "Traceback" not in said.err + said.out
    assert "bug" not in said.err
    assert said.err.strip()
    return said.err


@pytest.mark.parametrize("command", ["status", "samples", "audit", "eval", "export", "generate"])
@pytest.mark.parametrize("run", ["nowhere", "no\0where", "\ud800", "x" * 5000, "../..", "/dev/null", ""])
def test_a_run_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, run: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"generate": ["hello", "--run", run], "export": ["out", "--run", run]}.get(command, [run])
    refused(capsys, command, *words)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[1]", '{"buffer": 3}', '{"buffer": {"pid": 1}}', "[" * 200_000, "\0"]
)
@pytest.mark.parametrize("command", ["status", "samples", "generate"])
def test_a_run_whose_files_are_damaged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: str
) -> None:
    (tmp_path / "services.json").write_text(content)
    (tmp_path / "job.json").write_text(content)
    words = ["hello", "--run", str(tmp_path)] if command == "generate" else [str(tmp_path)]
    assert str(tmp_path) in refused(capsys, command, *words)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 3}', "[" * 200_000, "\0"])
@pytest.mark.parametrize("command", [("eval",), ("audit",), ("buffer", "retry")])
def test_a_run_whose_job_is_damaged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...], content: str
) -> None:
    RunFolder(tmp_path).write_services({})
    (tmp_path / "job.json").write_text(content)
    assert "job.json is not a job of this version" in refused(capsys, *command, str(tmp_path))


def test_a_job_that_another_release_wrote_names_that_release(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    RunFolder(tmp_path).write_services({})
    (tmp_path / "job.json").write_text('{"run": {"of_a_later_release": 1}}')
    assert f"this version, headrace {__version__}: run.of_a_later_release" in refused(capsys, "audit", str(tmp_path))
    (tmp_path / "version").write_text("9.1.0\n")
    assert "; headrace 9.1.0 wrote it: use that one" in refused(capsys, "audit", str(tmp_path))


@pytest.mark.parametrize("command", ["samples", "submit", "generate", "export"])
def test_a_service_that_takes_connections_and_never_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(runs, "_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        silence = ServiceEntry(address, None, None)
        RunFolder(tmp_path).write_services(dict.fromkeys(("buffer", "rollout", "trainer"), silence))
        run = ["--run", str(tmp_path)]
        words = {
            "samples": [str(tmp_path)],
            "submit": [*run, "--prompt", "2 + 2 ="],
            "generate": [*run, "hello"],
            "export": [*run, "out"],
        }
        assert f"service answers at {address} within 0.3 s" in refused(capsys, command, *words[command])


@pytest.mark.parametrize(
    "words",
    [
        ("samples", "-n", "-1"),
        ("samples", "--stream", "\ud800"),
        ("generate", "\ud800"),
        ("generate", "x", "--temperature", "nan"),
        ("nothing",),
        ("up", "nothing"),
        ("up", "buffer", "--config"),
        ("check", "hook", "/nowhere.py:f"),
    ],
)
def test_words_that_are_no_arguments(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    if words[:2] == ("check", "hook"):
        assert main(words) == 1
        assert "failed" in capsys.readouterr().out
    else:
        assert len(refused(capsys, *words)) < 12_000


@pytest.mark.parametrize("place", ["a file", "below a file", "of the system"])
def test_a_run_folder_that_cannot_be_made(load_with, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path, "below a file": tmp_path / "file", "of the system": Path("/proc/self")}[place]
    job = load_with("--run-name", "file")
    job = job.model_copy(update={"run": job.run.model_copy(update={"run_dir": folder})})  # since it was checked
    with pytest.raises(FailedPrecondition, match=r"run folder .* cannot be used: .*choose another --run-dir"):
        asyncio_run(Launcher(job, ["buffer"], print))


def asyncio_run(launcher: Launcher) -> None:
    asyncio.run(launcher.run())


def test_what_nobody_expected_is_one_line_and_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> int:
        raise ZeroDivisionError("\ud800")

    monkeypatch.setattr("headrace.cli.commands.policy.models.callback", broken)
    assert main(["models"]) == 1
    said = capsys.readouterr().err
    assert "this is a bug in headrace: ZeroDivisionError" in said
    kept = Path(said.split()[-1])
    assert "Traceback" in kept.read_text()
    kept.unlink()


def test_a_disk_that_is_full_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/out")

    monkeypatch.setattr("headrace.cli.commands.policy.export.callback", full)
    assert refused(capsys, "export", "out") == (
        "headrace: /data/out: No space left on device: free some space there, or name a folder on another disk\n"
    )
