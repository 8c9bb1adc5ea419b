"""One number in the job starts several buffers that share a ledger; one buffer is what it was without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import ConfigError, FailedPrecondition
from headrace.job.schema.job import Job
from headrace.launch.buffer_of_run import living_buffer
from headrace.launch.launcher import Launcher
from headrace.launch.previous_run import previous_run, resumption
from headrace.launch.specs import SERVICES
from headrace.run_folder import RunFolder, ServiceEntry

GONE = 2**22 + 1


def two_shards(load_with, folder: Path, *flags: str) -> Job:
    return load_with("--run-dir", str(folder / "runs"), "--run-name", "one", "--buffer-shards", "2", *flags)


def processes_of(launcher: Launcher) -> dict[str, list[str]]:
    return {each.name: list(each.command) for each in launcher._specs}


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def after(command: list[str], word: str) -> str:
    return command[command.index(word) + 1]


def test_each_shard_has_its_own_process_port_data_folder_and_log(load_with, tmp_path: Path) -> None:
    launcher = Launcher(two_shards(load_with, tmp_path), SERVICES, print)
    commands = processes_of(launcher)
    assert list(commands) == ["buffer-0", "buffer-1", "reward", "rollout", "trainer"]
    shards = [commands[name] for name in ("buffer-0", "buffer-1")]
    assert [after(command, "--shard") for command in shards] == ["0", "1"]
    run = launcher.folder
    assert [after(command, "--data-dir") for command in shards] == [str(run.ledger / f"shard-{k}") for k in range(2)]
    addresses = [after(command, "--address") for command in shards]
    assert len(set(addresses)) == 2
    assert launcher.job.services.buffer_address == ",".join(addresses)
    assert [each.log_file.name for each in launcher._specs[:2]] == ["buffer-0.log", "buffer-1.log"]


def test_a_shard_by_hand_is_one_process_at_its_own_address(load_with, tmp_path: Path) -> None:
    flags = (
        "--run-dir",
        str(tmp_path),
        "--buffer-address",
        "127.0.0.1:7001,127.0.0.1:7002",
        "--buffer-shard",
        "1",
    )
    launcher = Launcher(load_with(*flags), ["buffer"], print)
    (only,) = launcher._specs
    assert (only.name, only.address) == ("buffer", "127.0.0.1:7002")


def test_the_runs_folder_has_all_addresses_and_those_of_each_shard(load_with, tmp_path: Path) -> None:
    launcher = Launcher(two_shards(load_with, tmp_path), ["buffer", "reward"], print)
    launcher.folder.create(launcher.job)
    for _ in range(2):
        launcher._write_services({"buffer-0": os.getpid(), "buffer-1": GONE, "reward": os.getpid()})
    services = launcher.folder.services()
    assert list(services) == ["buffer", "buffer-0", "buffer-1", "reward"]
    joined = f"{services['buffer-0'].address},{services['buffer-1'].address}"
    assert services["buffer"] == ServiceEntry(joined, None, None)
    assert living_buffer(launcher.folder) == joined  # one of them restarts
    others = Launcher(two_shards(load_with, tmp_path), ["rollout"], print)
    assert others.job.services.buffer_address == joined


@pytest.mark.parametrize(
    ("there", "flags", "message"),
    [
        (
            ("shard-0/lock", "shard-1/lock"),
            ("--buffer-shards", "3"),
            "made with 2 shards, .* is 3: .*pass --buffer-shards 2 to",
        ),
        (("shard-0/lock", "shard-1/lock"), (), "made with 2 shards, and buffer_shards is 1"),
        (("state.sqlite",), ("--buffer-shards", "2"), "made with one buffer, .* pass --buffer-shards 1 to continue it"),
    ],
)
def test_another_number_of_shards_than_the_ledger_has_is_refused(
    load_with, tmp_path: Path, there: tuple[str, ...], flags: tuple[str, ...], message: str
) -> None:
    job = load_with("--run-dir", str(tmp_path), *flags)
    for name in there:
        touch(RunFolder(tmp_path / job.run.run_name).ledger / name)
    with pytest.raises(ConfigError, match=message):
        Launcher(job, ["buffer"], print)
    assert Launcher(job, ["reward"], print).job.services.reward_address is not None


def test_a_ledger_in_a_database_keeps_the_number_that_its_run_began_with(load_with, tmp_path: Path) -> None:
    database = ("--buffer-store", "postgres", "--buffer-postgres", "postgresql://u@h/d")
    job = two_shards(load_with, tmp_path, *database)
    Launcher(job, ["buffer"], print).folder.create(job)
    with pytest.raises(ConfigError, match="made with 2 shards, and buffer_shards is 1"):
        Launcher(two_shards(load_with, tmp_path, *database, "--buffer-shards", "1"), ["buffer"], print)


def test_a_resumed_run_keeps_its_number_of_shards(load_with, tmp_path: Path) -> None:
    job = two_shards(load_with, tmp_path)
    run = RunFolder(tmp_path / "runs" / "one")
    run.create(job)
    touch(run.ledger_of(0) / "lock")
    earlier = previous_run(run)
    assert earlier is not None
    assert resumption(earlier, two_shards(load_with, tmp_path)) == "starting again: no checkpoint yet"
    with pytest.raises(FailedPrecondition, match="was started with --buffer-shards 2, .* now it is 3"):
        resumption(earlier, two_shards(load_with, tmp_path, "--buffer-shards", "3"))


def test_check_shows_the_shards_and_refuses_another_number(
    load_with, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(job_file), "--fast", "--run-dir", str(tmp_path / "runs"), "--run-name", "one"]
    main([*words, "--buffer-shards", "3"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "buffer shards 3, each with 2 or 1 of the 4 groups of a step" in printed
    assert "was not told which" not in printed
    for shard in range(2):
        touch(RunFolder(tmp_path / "runs" / "one").ledger_of(shard) / "lock")
    assert main([*words, "--buffer-shards", "3"]) == 2
    refused = " ".join(capsys.readouterr().out.split())
    assert "a ledger keeps its number of shards; pass --buffer-shards 2 to continue it" in refused
