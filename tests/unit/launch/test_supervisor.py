"""Supervision of real processes: restarts, limits, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headrace.cli.commands.live import ORDER
from headrace.cli.main import main
from headrace.errors import NothingToLearn
from headrace.job.schema.job import Job
from headrace.launch.health import is_serving
from headrace.launch.process import ServiceProcess, ServiceSpec
from headrace.launch.specs import SERVICES, specs
from headrace.launch.supervisor import RestartPolicy, ServiceFailed, Supervisor
from headrace.process.exit_status import NOT_WORTH_RESTARTING, NOTHING_TO_LEARN, PEER_AWAY, PEER_LOST, ExitStatus
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder, ServiceEntry
from tests.support.processes.leftovers import parent_of

HERE = Path(__file__).parent
QUICK = RestartPolicy(max_restarts=2, first_backoff_seconds=0.05, longest_backoff_seconds=0.1)


@dataclass
class Stage:
    """A folder, what the supervisor said, and the latest process ids."""

    folder: Path
    told: list[str] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)

    def spec(self, *arguments: str, name: str = "fake", port: int | None = None) -> ServiceSpec:
        address = f"127.0.0.1:{port or free_port()}"
        return ServiceSpec(
            name=name,
            command=[
                *(sys.executable, str(HERE / "fake_service.py"), "--address", address),
                *("--children", str(self.folder / "children"), *arguments),
            ],
            address=address,
            metrics_address="127.0.0.1:0",
            log_file=self.folder / f"{name}.log",
            start_seconds=120.0,
        )

    def supervisor(self, *specs: ServiceSpec, until: str | None = None) -> Supervisor:
        return Supervisor(specs, until, self.hear, QUICK, self.pids.update)

    def hear(self, line: str) -> None:
        """What was seen to serve has a file that says so."""
        self.told.append(line)
        name, _, rest = line.partition(" ")
        if rest.startswith("ready"):
            self.seen(name).touch()

    def seen(self, name: str = "fake") -> Path:
        return self.folder / f"{name}-was-seen"

    def dying(self, exit_code: int, name: str = "fake") -> ServiceSpec:
        """Ends as soon as it was seen to serve."""
        return self.spec("--exit-when", str(self.seen(name)), "--exit-code", str(exit_code), name=name)

    def children(self) -> list[int]:
        return [int(line) for line in (self.folder / "children").read_text().split()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # processes and files set no event
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_killed_service_comes_back_at_the_same_address_without_its_old_children(stage: Stage) -> None:
    spec = stage.spec()
    async with running(stage.supervisor(spec)):
        await becomes(lambda: any("ready" in line for line in stage.told))
        first = stage.pids["fake"]
        os.kill(first, signal.SIGKILL)
        await becomes(lambda: sum("ready" in line for line in stage.told) == 2)
        assert stage.pids["fake"] != first
        assert await is_serving(spec.address)
        old, new = stage.children()
        assert not alive(old)
        assert alive(new)
    assert "fake ended with signal 9 (killed: out of memory? It had " in stage.told[1]


@pytest.mark.parametrize("death", ["kill -KILL $$", "exit 1"])
async def test_a_trainer_with_fault_tolerance_that_dies_before_it_is_ready_is_started_again(
    stage: Stage, death: str
) -> None:
    """Twice: the job's own number of restarts counts these, too."""
    spec = replace(stage.spec(name="trainer"), max_restarts=2)
    deaths = stage.folder / "deaths"
    script = f"echo died >> {deaths}; test $(wc -l < {deaths}) -gt 2 || {death}; exec {shlex.join(spec.command)}"
    supervised = asyncio.create_task(stage.supervisor(replace(spec, command=["/bin/sh", "-c", script])).run())
    try:
        await becomes(lambda: supervised.done() or any("ready" in line for line in stage.told))
        assert not supervised.done(), str(supervised.exception())
        assert len(deaths.read_text().split()) == 3
    finally:
        supervised.cancel()
        await asyncio.gather(supervised, return_exceptions=True)


async def test_a_service_that_keeps_dying_ends_the_run_with_its_last_lines(stage: Stage) -> None:
    with pytest.raises(ServiceFailed, match=r"fake ended 3 times in 600 s, last with exit code 7; the end of") as error:
        await stage.supervisor(stage.dying(7)).run()
    assert "serving" in error.value.message
    assert sum("restart" in line for line in stage.told) == 2


async def test_a_run_that_loses_a_rank_ends_with_the_ranks_last_lines(stage: Stage) -> None:
    dead = stage.folder / "rank-1-is-gone"
    service = stage.spec("--exit-when", str(dead), "--exit-code", str(PEER_LOST))
    code = (
        "import os, pathlib, sys, time\n"
        "if os.environ['RANK'] == '0': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        f"while not os.path.exists({str(stage.seen())!r}): time.sleep(0.01)\n"
        "print('step 7: out of memory soon', flush=True)\n"
        f"pathlib.Path({str(dead)!r}).touch(); os.kill(os.getpid(), 9)"
    )
    starter = [sys.executable, "-m", "headrace.launch.ranks.local", "2", str(stage.folder)]
    ranks = replace(
        service, command=[*starter, sys.executable, "-c", code, *service.command[1:]], no_restart="pass --a-flag"
    )
    with pytest.raises(ServiceFailed, match=r"fake ended with signal 9 \(.*\): pass --a-flag") as error:
        await stage.supervisor(ranks).run()
    assert "rank 1 ended with signal 9 (killed: out of memory? It had " in error.value.message
    assert "step 7: out of memory soon" in error.value.message


async def test_a_service_that_cannot_start_is_not_tried_again(stage: Stage) -> None:
    other = stage.spec(name="other")
    with pytest.raises(ServiceFailed, match="fake ended with exit code 1 before it was ready") as error:
        await stage.supervisor(other, stage.spec("--broken", "CUDA is out of memory")).run()
    assert "CUDA is out of memory" in error.value.message
    assert not any("restart" in line for line in stage.told)
    assert not alive(stage.pids["other"])


async def test_a_service_whose_peer_is_away_is_started_again_as_often_as_it_takes(stage: Stage) -> None:
    spec = replace(stage.dying(PEER_AWAY), no_restart="only for its own faults")
    async with running(stage.supervisor(spec)):
        await becomes(lambda: sum("a service that it needs did not answer" in line for line in stage.told) == 2 * 2 + 1)
    assert not any("restart" in line for line in stage.told)


async def test_a_peer_that_never_comes_back_ends_the_run(stage: Stage) -> None:
    policy = replace(QUICK, max_away_seconds=0.2)
    with pytest.raises(ServiceFailed, match="fake has waited without success for another service for .* s; the end of"):
        await Supervisor([stage.dying(PEER_AWAY)], None, stage.hear, policy, stage.pids.update).run()


async def test_the_last_service_ends_the_run(stage: Stage) -> None:
    worker = stage.spec(name="worker")
    await stage.supervisor(worker, stage.dying(0, name="trainer"), until="trainer").run()
    assert not alive(stage.pids["worker"])


async def test_a_service_that_hangs_at_the_start_says_what_it_does_and_is_given_up(stage: Stage) -> None:
    spec = ServiceSpec(
        name="slow",
        command=["/bin/sh", "-c", """echo '{"event": "engine_starting"}'; exec sleep 600"""],
        address=f"127.0.0.1:{free_port()}",
        metrics_address="127.0.0.1:0",
        log_file=stage.folder / "slow.log",
        start_seconds=2.0,
    )
    policy = replace(QUICK, progress_seconds=0.5)
    with pytest.raises(ServiceFailed, match=r"slow does not serve after 2 s \(--start-timeout-seconds\)") as error:
        await Supervisor([spec], None, stage.hear, policy, stage.pids.update).run()
    assert any(line.startswith("slow is starting, 1 s so far, last: engine starting") for line in stage.told)
    assert "engine_starting" in error.value.message
    assert not alive(stage.pids["slow"])


async def test_a_trainer_with_nothing_to_learn_from_ends_the_run_with_its_own_words_alone(stage: Stage) -> None:
    words = 'a warning of a library\nfake: 40 of the last 40 samples failed:\n  40 HOOK_RAISED: why\n{"event": "end"}'
    dying = stage.dying(NOTHING_TO_LEARN)
    with pytest.raises(NothingToLearn) as failed:
        await stage.supervisor(replace(dying, command=[*dying.command, "--last-words", words])).run()
    assert failed.value.message.startswith("fake: 40 of the last 40 samples failed:\n  40 HOOK_RAISED: why\ncorrect")
    assert not any("restart" in line for line in stage.told)


async def test_what_the_service_left_counts_where_its_starter_loses_the_exit_code(stage: Stage) -> None:
    written, ending = stage.folder / "written", stage.folder / "ending"
    ExitStatus(NOTHING_TO_LEARN, "40 of the last 40 samples failed:\n  40 HOOK_RAISED: why").write(written)
    dying = stage.dying(143)
    script = f'"$@"; code=$?; cp {written} {ending}; exit $code'
    spec = replace(
        dying, command=["/bin/sh", "-c", script, "sh", *dying.command], exit_status=ending, keeps_exit_code=False
    )
    with pytest.raises(
        NothingToLearn, match="fake: 40 of the last 40 samples failed:\n  40 HOOK_RAISED: why\ncorrect that"
    ):
        await stage.supervisor(spec).run()
    assert not any("restart" in line or "did not answer" in line for line in stage.told)


async def test_a_service_is_ended_once_its_grace_is_over_and_not_before(stage: Stage) -> None:
    stubborn = replace(stage.spec(), command=["/bin/sh", "-c", "trap '' TERM; echo up; sleep 600 & wait; wait"])
    process = ServiceProcess(stubborn)
    await process.start()
    await becomes(lambda: "up" in stubborn.log_file.read_text())
    await process.stop(grace_seconds=0.2)
    assert process.exit_code == 128 + signal.SIGKILL


async def test_a_service_whose_guard_is_killed_ends_with_it_and_comes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    spec = stage.spec("--slow-to-end")
    supervisor = Supervisor([spec], None, stage.hear, QUICK, stage.pids.update, lambda: 0.0)
    async with running(supervisor):
        await becomes(lambda: any("ready" in line for line in stage.told))
        first = stage.pids["fake"]
        os.kill(parent_of(first), signal.SIGKILL)
        await becomes(lambda: sum("ready" in line for line in stage.told) == 2)
        assert not alive(first)
        assert await is_serving(spec.address)
    os.kill(stage.children()[0], signal.SIGKILL)  # what its service had started has no guard any more
    assert "fake ended with signal 9" in stage.told[1]


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
