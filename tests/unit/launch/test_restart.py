"""`headrace restart` and what the launcher makes of it: an end that was asked for is none that counts."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.commands.live import ORDER
from headrace.cli.main import main
from headrace.job.schema.job import Job
from headrace.launch.health import is_serving
from headrace.launch.specs import SERVICES, specs
from headrace.launch.supervisor import ServiceFailed
from headrace.process.exit_status import NOT_WORTH_RESTARTING
from headrace.rpc.net import Address, free_port
from headrace.run_folder import RunFolder, ServiceEntry
from tests.unit.launch.test_supervisor import Stage, becomes, running


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def times_ready(stage: Stage) -> int:
    return sum("ready" in line for line in stage.told)


async def test_a_restart_that_was_asked_for_is_one_at_once_and_counts_for_nothing(stage: Stage) -> None:
    request = stage.folder / "again"
    spec = replace(stage.spec(), restart_request=request, max_restarts=0, no_restart="not by itself")
    async with running(stage.supervisor(spec, until="fake")):
        for number in range(1, 3):
            await becomes(lambda number=number: times_ready(stage) == number)  # type: ignore[misc]
            pid = stage.pids["fake"]
            request.touch()
            await becomes(lambda pid=pid: stage.pids["fake"] != pid)  # type: ignore[misc]
            assert not request.exists()
        await becomes(lambda: times_ready(stage) == 3)
        assert await is_serving(spec.address)
    assert not any("ended with" in line for line in stage.told)


async def test_a_service_whose_job_is_wrong_by_now_is_not_started_again_for_ever(stage: Stage) -> None:
    request = stage.folder / "again"
    stubborn = ["/bin/sh", "-c", f'trap "exit {NOT_WORTH_RESTARTING}" TERM; "$@" & wait', "sh"]
    spec = stage.spec()
    spec = replace(spec, command=[*stubborn, *spec.command], restart_request=request)
    task = asyncio.create_task(stage.supervisor(spec).run())
    await becomes(lambda: times_ready(stage) == 1)
    request.touch()
    with pytest.raises(ServiceFailed, match="fake ended with exit code 2"):
        await task


async def test_who_connects_to_a_held_port_is_answered_by_the_process_that_starts_next(stage: Stage) -> None:
    held, fake, second = Address("127.0.0.1", free_port()), stage.spec(), stage.folder / "second"
    code = (
        "import os, pathlib, socket, sys\n"
        f"if pathlib.Path({str(second)!r}).exists():\n"
        "    listener = socket.socket(fileno=int(sys.argv[-1].removeprefix('--listener=')))\n"
        "    caller, _ = listener.accept()\n"
        "    caller.sendall(b'here I am')\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:-1]])"
    )
    command = [fake.command[0], "-c", code, *fake.command[1:]]
    spec = replace(fake, command=command, held=held, restart_request=stage.folder / "again")
    async with running(stage.supervisor(spec)):
        await becomes(lambda: times_ready(stage) == 1)
        with socket.create_connection((held.host, held.port), 60) as caller:
            second.touch()
            (stage.folder / "again").touch()
            assert await asyncio.to_thread(caller.recv, 100) == b"here I am"
        await becomes(lambda: times_ready(stage) == 2)


def test_the_launcher_holds_the_port_of_openais_protocol_for_each_rollout_service(load_with, tmp_path: Path) -> None:
    def held(*flags: str) -> list[str | None]:
        addresses = ("--buffer-address", "b:1", "--reward-address", "r:1", "--rollout-address", "c:1,c:2")
        job: Job = load_with("--run-dir", str(tmp_path), *addresses, *flags)
        return [each.held and str(each.held) for each in specs(job, "rollout", RunFolder(tmp_path))]

    assert held("--rollout-service", "1", "--openai-port", "8000") == ["127.0.0.1:8001"]
    assert held("--rollout-service", "1") == [None]


def test_services_that_are_called_come_before_those_that_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(ORDER) == sorted(SERVICES)
    assert ORDER.index("trainer") > ORDER.index("rollout") > max(ORDER.index("buffer"), ORDER.index("reward"))
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    run.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, None), "trainer": ServiceEntry("t:1", None, 2**22)})
    assert main(["restart", "bufer", str(run.path)]) == 1
    assert "has no process bufer: there are buffer, trainer, and all" in " ".join(capsys.readouterr().err.split())
    assert main(["restart", "buffer", str(run.path)]) == 1
    assert "keeps buffer alive: restart it where it was started" in " ".join(capsys.readouterr().err.split())
    assert main(["restart", "all", str(run.path)]) == 1
    assert "keeps a service alive" in " ".join(capsys.readouterr().err.split())
