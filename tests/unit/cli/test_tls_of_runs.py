"""A run's services and commands meet with certificates; an open address is a decision that somebody made."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from headrace.cli.authority import issue_client
from headrace.cli.main import main
from headrace.launch.health import is_serving
from headrace.rpc.access import Role
from headrace.rpc.net import free_port
from headrace.rpc.tls import VARIABLE

START_SECONDS = 300.0
_ANYWHERE = "0.0.0.0"  # noqa: S104  # what is refused


class Up:
    """`headrace up SERVICE` with these flags, in a folder of its own."""

    def __init__(self, folder: Path, job_file: Path, *flags: str, service: str = "buffer") -> None:
        self._folder = folder
        self._words = ("up", service, "--config", str(job_file), "--run-dir", str(folder / "runs"), *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        command = (
            sys.executable,
            "-c",
            "import sys; from headrace.cli.main import main; sys.exit(main())",
            *self._words,
        )
        with (self._folder / "up.log").open("w") as log:
            self._process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        return self._process

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def until_serving(address: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not await is_serving(address):
            assert process.returncode is None, "it ended"
            await asyncio.sleep(0.2)


def callers_in(log: Path) -> list[tuple[str, str]]:
    """Name and role of each caller that was refused something."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [(each["caller"], each["role"]) for each in events if each["event"] == "call_refused"]


async def test_a_run_with_tls_dir_is_reached_by_its_own_commands_and_by_named_clients(
    job_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    assert main(["certs", str(tmp_path / "tls")]) == 0
    client = issue_client(tmp_path / "tls", "alice", Role.PRODUCER, 30).folder
    address = f"127.0.0.1:{free_port()}"
    async with Up(tmp_path, job_file, "--tls-dir", str(tmp_path / "tls"), "--buffer-address", address) as process:
        monkeypatch.setenv(VARIABLE, str(client))
        await until_serving(address, process)
        monkeypatch.delenv(VARIABLE)
        (run,) = (tmp_path / "runs").iterdir()
        for words in (("submit", str(run)), ("submit", "--buffer-address", address)):
            code = await asyncio.to_thread(main, [*words, "--prompt", "1 + 1 =", "--label", "2"])
            monkeypatch.delenv(VARIABLE, raising=False)
            assert code == (0 if str(run) in words else 1), words
        assert f"set {VARIABLE} to a folder that `headrace certs` made" in capsys.readouterr().err
        words = ["submit", str(run), "--prompt", "1 + 1 =", "--label", "2", "--stream", "absent"]
        assert await asyncio.to_thread(main, words) == 1
        monkeypatch.setenv(VARIABLE, str(client))
        words = ["submit", "--buffer-address", address, "--prompt", "1 + 2 =", "--label", "3"]
        assert await asyncio.to_thread(main, words) == 0
        assert await asyncio.to_thread(main, [*words, "--stream", "absent"]) == 1
    monkeypatch.delenv(VARIABLE)
    words = ["buffer", "drop", str(run), "--group", "train/1", "--reason", "wrong"]
    assert await asyncio.to_thread(main, words) == 0, "its ledger is served with its own certificate"
    refused = callers_in(run / "logs/buffer.log")
    assert refused == [("operator", "admin"), ("alice", "producer")], "commands about a run are its operator's"


@pytest.mark.parametrize("allowed", [False, True])
async def test_an_address_that_others_reach_is_refused_unless_the_job_says_insecure(
    job_file: Path, tmp_path: Path, allowed: bool
) -> None:
    port = free_port(_ANYWHERE)
    flags = ["--buffer-address", f"{_ANYWHERE}:{port}", *(["--insecure"] if allowed else [])]
    async with Up(tmp_path, job_file, *flags) as process:
        if allowed:
            await until_serving(f"127.0.0.1:{port}", process)
        else:
            assert await asyncio.wait_for(process.wait(), START_SECONDS) != 0
            assert "make certificates with `headrace certs FOLDER`" in (tmp_path / "up.log").read_text()
