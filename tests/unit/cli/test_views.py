"""What the console says of a run: samples that are not trained, waits, rewards, evaluations."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.cli.main import main
from headrace.cli.view.lines import engines_line, failures_line, print_no_wrap
from headrace.cli.view.run_view import LongPhase, RunView, awaited, waits_too_long
from headrace.job.schema.job import Job
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer, Service
from headrace.run_folder import RunFolder, ServiceEntry
from services.trainer.serving.report import RunReport
from tests.support.run_views import view_of

READY = rollout_pb2.Engine(state=rollout_pb2.ENGINE_STATE_READY)
STATS = buffer_pb2.StreamStats(groups={"QUEUED": 1})
RAISED = "hook agent.py:f raised KeyError: 'answer' (agent.py:12)"


def failing(count: int, of: int, reason: str = "HOOK_RAISED", example: str = RAISED) -> buffer_pb2.StreamStats:
    one = buffer_pb2.FailureCount(reason=reason, num_samples=count, example=example, group_id="train/3")
    production = buffer_pb2.Production(num_samples=of, num_failed=count, failures=[one])
    return buffer_pb2.StreamStats(production=production, groups={"QUEUED": 0, "LEASED": 0})


def waiting(seconds: float, step: int = 0) -> trainer_pb2.GetStatusResponse:
    return trainer_pb2.GetStatusResponse(
        phase=trainer_pb2.PHASE_WAITING, step=step, groups_per_step=4, groups_ready=1, waiting_seconds=seconds
    )


def test_failures_are_told_as_they_come_in_the_users_words_and_again_when_they_have_doubled(load_with) -> None:
    view = view_of(load_with())
    for count in (4, 5, 7, 8, 9):
        view.on_stats(failing(count, 2 * count))
    assert view.unread() == [
        f"4 of 8 samples are not trained, HOOK_RAISED: {RAISED} (e.g. group train/3)",
        f"8 of 16 samples are not trained, HOOK_RAISED: {RAISED} (e.g. group train/3)",
    ]


def test_the_live_table_shows_the_failures_of_the_moment_and_no_markup_or_escape_of_theirs(load_with) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = view_of(load_with())
    view.on_stats(failing(3, 9, "HOOK_INVALID", "[red]no\x1b[2J tokens"))
    console.print(view)
    text = console.export_text()
    assert "3 of 9 samples failed, most often 3 HOOK_INVALID: [red]no [2J tokens" in text
    assert "\x1b" not in text


def test_a_line_of_failures_has_drops_three_reasons_and_what_came_back() -> None:
    failures = [
        buffer_pb2.FailureCount(reason=name, num_samples=count, example=f"{name}!")
        for name, count in (("A", 9), ("B", 5), ("C", 4), ("D", 1))
    ]
    production = buffer_pb2.Production(
        num_samples=40, num_failed=15, num_dropped=4, failures=failures, num_groups_returned=2, last_return="no engine"
    )
    assert failures_line(production) == (
        "15 of 40 samples failed, 4 of 40 samples dropped, most often 9 A: A!; 5 B: B!; 4 C: C!, "
        "2 groups came back, the last: no engine"
    )


def test_a_first_batch_that_takes_ten_times_as_long_as_expected_is_told_and_again_when_that_has_doubled(
    load_with,
) -> None:
    view = view_of(load_with())
    for seconds in (1.0, 299.0, 300.0, 301.0, 599.0, 600.0):
        view.on_status(waiting(seconds))
    lines = view.unread()
    assert [line.partition(" for its batch")[0] for line in lines] == [
        "step 1 has waited 5 min",
        "step 1 has waited 10 min",
    ]
    assert "1/4 groups ready: waiting on the buffer, which does not answer" in lines[0]


@pytest.mark.parametrize(
    ("fleet", "stats", "whom"),
    [
        (None, None, "on the buffer, which does not answer"),
        (None, failing(0, 0), "on the rollout service, which does not answer"),
        ({"engines": [rollout_pb2.Engine()]}, failing(0, 0), "on the rollout service: 0/1 engines ready"),
        (
            {"engines": [READY], "samples_being_scored": 2, "reward_address": "judge:7"},
            failing(0, 0),
            "on the reward service at judge:7: 2 samples wait for their scores",
        ),
        ({"engines": [READY]}, failing(0, 0), "for prompts: none is queued"),
        ({"engines": [READY]}, buffer_pb2.StreamStats(trouble="p.jsonl is gone"), "for prompts: p.jsonl is gone"),
        ({"engines": [READY]}, failing(8, 8), f"8 of 8 samples failed, most often 8 HOOK_RAISED: {RAISED}"),
    ],
)
def test_the_line_says_on_whom_it_waits(fleet, stats: buffer_pb2.StreamStats | None, whom: str) -> None:
    answer = rollout_pb2.GetFleetResponse(**fleet) if fleet else None
    assert whom in awaited(waiting(300.0), answer, stats)


@pytest.mark.parametrize("service", ["rollout", "buffer", "trainer"])
def test_the_live_table_says_since_when_a_service_is_away_until_the_run_has_ended(load_with, service: str) -> None:
    view = view_of(load_with())
    view.on_silence(service)
    assert "not answer" not in table_of(view)
    view.on_stats(STATS)
    view.on_fleet(rollout_pb2.GetFleetResponse(engines=[READY], samples_in_flight=48))
    view.on_status(waiting(1.0))
    view.on_silence(service)
    assert "has not answered since" in table_of(view)
    assert ("48 samples in flight" in table_of(view)) == (service != "rollout")
    view.on_status(trainer_pb2.GetStatusResponse(phase=trainer_pb2.PHASE_FINISHED))
    view.on_fleet(rollout_pb2.GetFleetResponse())
    view.on_stats(STATS)
    view.on_silence(service)
    assert "not answer" not in table_of(view)


def table_of(view: RunView) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view)
    return console.export_text()


def test_what_the_rollout_service_warns_of_is_a_line_once(load_with) -> None:
    view = view_of(load_with())
    for _ in range(3):
        view.on_fleet(rollout_pb2.GetFleetResponse(warnings=["hook a.py:f leaves weight_versions\x1b[2J empty"]))
    assert view.unread() == ["hook a.py:f leaves weight_versions [2J empty"]


class WaitingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, seconds: float, step: int) -> None:
        self._status = waiting(seconds, step)

    async def GetStatus(self, request: object, context: object) -> trainer_pb2.GetStatusResponse:
        return self._status


@asynccontextmanager
async def run_that_waits(folder: RunFolder, job: Job, seconds: float, step: int = 0) -> AsyncIterator[None]:
    """Its trainer answers; its buffer is away."""
    service = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server = RpcServer("trainer", "127.0.0.1:0", [Service(WaitingTrainer(seconds, step), add, service)])
    await server.start()
    folder.create(job)
    away = f"127.0.0.1:{free_port()}"
    folder.write_services(
        {
            "trainer": ServiceEntry(server.address, None, os.getpid()),
            "buffer": ServiceEntry(away, None, None),
        }
    )
    try:
        yield
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(("seconds", "is_told"), [(100.0, False), (110.0, True)])
def test_status_compares_a_later_batch_with_those_before_it_as_the_console_does(
    tmp_path: Path, seconds: float, is_told: bool
) -> None:
    rows = [{"step": 1, "time/wait_seconds": 9.0}, {"step": 1, "eval/x": 1.0}, {"step": 2, "time/wait_seconds": 11.0}]
    rows.append({"step": 3, "time/wait_seconds": 400.0})
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "ti')
    assert waits_too_long(waiting(seconds, step=3), file) is is_told


async def test_status_prints_it_below_its_table(load_with, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_that_waits(RunFolder(tmp_path), load_with(), 3600.0):
        assert await asyncio.to_thread(main, ["status", str(tmp_path)]) == 1
    assert "step 1 has waited 60 min for its batch, 1/4 groups ready: waiting on the buffer" in capsys.readouterr().out


def test_an_engine_that_stays_down_is_named_with_the_reason() -> None:
    ready = rollout_pb2.Engine(engine_id="engine-0", state=rollout_pb2.ENGINE_STATE_READY)
    down = rollout_pb2.Engine(
        engine_id="engine-1", state=rollout_pb2.ENGINE_STATE_QUARANTINED, trouble="ended with exit code -9;\nKilled"
    )
    said = "1/2 engines ready, engine-1 ended too often and stays down: ended with exit code -9; Killed"
    assert engines_line([ready, down]) == said


PUBLISHING = trainer_pb2.GetStatusResponse(phase=trainer_pb2.PHASE_PUBLISHING, step=3)


def told(phase: LongPhase, now: list[float], *seconds: float, silent: dict[str, str] | None = None) -> list[str]:
    """The lines of one publication, at seconds since its begin."""
    begun = now[0]
    phase.line(PUBLISHING, {})
    lines = []
    for each in seconds:
        now[0] = begun + each
        lines.append(phase.line(PUBLISHING, silent or {}))
    phase.line(trainer_pb2.GetStatusResponse(phase=trainer_pb2.PHASE_TRAINING, step=3), {})
    return [line for line in lines if line is not None]


def test_a_long_publication_is_told_and_again_when_it_has_doubled() -> None:
    now = [0.0]
    lines = told(LongPhase(lambda: now[0]), now, 5.0, 59.0, 60.0, 119.0, 121.0, silent={"rollout": "09:39:11"})
    assert lines == [
        "publishing the weights: 60 s so far; the rollout service has not answered since 09:39:11",
        "publishing the weights: 2 min so far; the rollout service has not answered since 09:39:11",
    ]


def test_ten_times_the_usual_is_long_and_every_publication_counts_from_its_own_begin() -> None:
    now = [0.0]
    phase = LongPhase(lambda: now[0])
    for _ in range(3):
        phase.took({"time/publish_seconds": 2.0})
    assert told(phase, now, 19.0, 20.0) == ["publishing the weights: 20 s so far"]
    assert told(phase, now, 19.0) == []


def test_the_console_shows_it_first_and_then_that_of_the_trained_samples(load_with) -> None:
    view = view_of(load_with())
    for step in range(1, 7):
        metrics = {"reward/mean": 0.5, "reward/all/mean": step / 10}
        row = trainer_pb2.WatchProgressResponse(step=step, time=Timestamp(seconds=step), metrics=metrics)
        view.on_progress(row)
    assert "reward 0.600, of trained 0.500" in view.unread()[-1]
    assert "mean reward: first three steps 0.200, last three 0.500" in view.summary()


@pytest.mark.parametrize(
    ("metrics", "is_called_out"),
    [
        ({"reward/mean": 1.0, "reward/std": 0.0, "samples/count": 32.0}, True),
        ({"reward/mean": 0.0, "reward/all/mean": 0.4, "reward/std": 0.0, "samples/count": 8.0}, True),
        ({"reward/mean": -1.0, "reward/std": 0.0, "samples/count": 2.0}, True),
        ({"reward/mean": 0.5, "reward/std": 0.5, "samples/count": 32.0}, False),
        ({"reward/mean": 1.0, "reward/std": 0.0, "samples/count": 1.0}, False),
        ({"loss/sft": 2.0, "samples/count": 32.0}, False),
    ],
)
def test_a_step_in_which_all_rewards_are_equal_is_called_out(
    load_with, metrics: dict[str, float], is_called_out: bool
) -> None:
    view = view_of(load_with())
    view.on_progress(trainer_pb2.WatchProgressResponse(step=1, time=Timestamp(seconds=1), metrics=metrics))
    assert ("nothing to learn in this step" in view.unread()[-1]) == is_called_out


_PATH = "/home/someone/" + "a-long-folder/" * 12 + "train.jsonl"


def test_a_path_in_a_table_stays_whole_in_a_pipe_and_no_line_ends_in_spaces():
    assert _printed(terminal=False).splitlines() == ["prompts  " + _PATH, "seed     1"]


def _printed(*, terminal: bool) -> str:
    file = StringIO()
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("prompts", Text(_PATH))
    table.add_row("seed", Text("1"))
    print_no_wrap(Console(file=file, width=80, force_terminal=terminal), table)
    return file.getvalue()


def result(mean: float, first: int, last: int) -> dict[str, float]:
    return {
        "eval_error": 0.0, "eval/sums": mean, "eval_low/sums": mean - 0.1, "eval_high/sums": mean + 0.1,
        "eval_pass/sums@1": mean, "eval_pass/sums@8": 0.875,
        "eval_min_version/sums": first, "eval_max_version/sums": last,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    run.write_services({})
    return run


async def test_evaluations_are_shown_by_step_and_data_set_with_intervals_and_versions(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RunReport(run.path)
    report.write(7, {"reward/mean": 0.5})
    report.write(5, result(0.5, 5, 7))
    report.write(0, result(0.25, 0, 0) | {"eval/aime": 0.125})
    report.write(10, {"eval_error": 1.0}, ["the evaluation failed, UNAVAILABLE: nobody [is] there"])
    report.close()
    assert main(["eval", "--history", "one"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "aime", "sums", "versions"]
    assert lines[1] == ["0", "0.125", "0.250", "[0.150,", "0.350]", "@8", "0.875", "0"]
    assert lines[2] == ["5", "–", "0.500", "[0.400,", "0.600]", "@8", "0.875", "5", "to", "7"]
    assert lines[3] == ["10", "–", "–", "no", "result"]
    assert " ".join(lines[4]) == "the evaluation failed, UNAVAILABLE: nobody [is] there"
    assert "evaluations.png has the curves" in " ".join(lines[5])


def test_a_run_without_evaluations_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--history", "one"]) != 0
    assert "has no evaluation yet" in capsys.readouterr().err
