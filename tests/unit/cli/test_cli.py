"""What a person types, and what is printed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.commands.ledger import prompts_of
from headrace.cli.main import main
from headrace.cli.runs import find_run
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.job.option import options
from headrace.job.rules.scope import services_here
from headrace.launch.launcher import Launcher
from headrace.run_folder import RunFolder, ServiceEntry
from tests.support.run_views import view_of


def test_check_prints_the_plan(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(job_file), "--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 ranks" in printed
    assert "data 2 x tensor 2 x pipeline 1" in printed
    assert "4 prompts x 8 samples = 2 optimizer steps x 16 samples" in printed
    assert "buffer started here" in printed
    assert "megatron-core" in printed


def test_a_mistake_is_one_line_and_exit_code_2(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job_file), "--num-rolout", "3"]) == 2
    said = capsys.readouterr().err
    assert said == "headrace: unknown flag --num-rolout: did you mean --num-rollout?\n"


def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 1
    assert "no run in" in capsys.readouterr().err
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.path.mkdir(parents=True)
    folder.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, None)})
    assert main(["samples", "two"]) == 1
    assert "no run two; runs here: one" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: the newest folder's has ended, an older one lives."""
    monkeypatch.chdir(tmp_path)
    for name, pid in (("early", 2**22 + 1), ("alive", os.getpid()), ("newest", 2**22 + 1)):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, pid)})
    return tmp_path / "runs"


def test_the_default_run_is_the_one_that_lives(runs: Path) -> None:
    assert find_run(None).path.name == "alive"
    RunFolder(runs / "alive").write_services({"buffer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    os.utime(runs / "newest" / "services.json", (2e9, 2e9))
    assert find_run(None).path.name == "newest"


def test_of_two_runs_that_live_one_is_named(runs: Path) -> None:
    RunFolder(runs / "early").write_services({"buffer": ServiceEntry("127.0.0.1:1", None, os.getpid())})
    with pytest.raises(FailedPrecondition, match="2 runs are live: alive, early: name one of them"):
        find_run(None)
    assert find_run("early").path.name == "early"


@pytest.mark.parametrize("command", [["generate", "2 + 2 ="], ["submit", "--prompt", "2 + 2 ="]])
def test_a_run_that_has_ended_says_so_at_once(
    command: list[str], tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.path.mkdir(parents=True)
    ended = ServiceEntry("127.0.0.1:1", None, 2**22 + 1)
    folder.write_services({"buffer": ended, "rollout": ended})
    assert main(command) == 1
    assert "runs/one has ended, and its" in capsys.readouterr().err


def test_help_shows_on_one_screen_what_a_first_run_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for flag in ("--hf-checkpoint X", "--rollout-batch-size X", "--eval-prompt-data NAME PATH", "--lr X", "--sglang-"):
        assert flag in printed
    assert "--swiglu" not in printed
    assert "--help-all" in printed
    assert len(printed.splitlines()) <= 60


def test_help_all_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    printed = capsys.readouterr().out
    own = [option.flag for option in options().values() if option.section != "megatron"]
    for flag in (*own, "--swiglu", "--clip-grad", "--sglang-NAME"):
        assert f"{flag} " in printed


def test_services_with_an_address_are_not_started(load_with) -> None:
    job = load_with("--reward-address", "127.0.0.1:7003", "--trainer-address", "127.0.0.1:7004")
    assert services_here(job) == ["buffer", "rollout", "trainer"]
    launcher = Launcher(job, services_here(job), print)
    assert launcher.job.services.reward_address == "127.0.0.1:7003"
    assert launcher.job.services.trainer_address == "127.0.0.1:7004"
    assert launcher.job.services.buffer_address is not None


async def test_a_service_runs_once_in_a_run(load_with, tmp_path: Path) -> None:
    job = load_with("--run-dir", str(tmp_path / "runs"))
    first, second = (Launcher(job, ["buffer"], print) for _ in range(2))
    first.folder.path.mkdir(parents=True)
    lock = (first.folder.path / ".buffer.lock").open("w")

    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(FailedPrecondition, match="the buffer service of run .* is already running"):
        await second.run()
    lock.close()


def test_prompts_of_a_file_keep_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text('{"prompt": "4 + 3", "label": 7}\n\n{"prompt": [{"role": "user", "content": "hello"}]}\n')
    first, second = prompts_of(path, chat=False)
    assert (first.text, first.label) == ("4 + 3", "7")
    assert second.messages.messages[0].content == "hello"
    assert [prompt.prompt_id for prompt in prompts_of(path, chat=False)] == [first.prompt_id, second.prompt_id]
    assert next(prompts_of(path, chat=True)).messages.messages[0].role == "user"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "more.jsonl, line 1: not JSON: Expecting"),
        ('{"prompt": ["a"]}', "'prompt' must be text or an array of chat messages, each an object with a role"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidArgument, match=message):
        list(prompts_of(path, chat=False))


def test_a_row_that_comes_again_is_one_row_and_a_step_that_is_trained_again_replaces_the_first(load_with) -> None:
    view = view_of(load_with())
    rewards = [0.1, 0.1, 0.9, 0.1, 0.4, 0.4, 0.4]
    for when, (step, reward) in enumerate(zip([1, 2, 3, 3, 4, 5, 6], rewards, strict=True)):
        for _ in range(2):
            view.on_progress(_row(step, when, {"reward/mean": reward}))
    view.on_progress(_row(6, 7, {"eval/sums": 0.5}))
    lines = view.summary()
    assert lines[0].startswith("finished 6 steps")
    assert "mean reward of trained samples: first three steps 0.100, last three 0.400" in lines
    assert "eval/sums: 0.500 after step 6" in lines
    assert len(view.unread()) == 8


def test_a_step_is_a_line_in_one_order_with_what_is_left(load_with) -> None:
    view = view_of(load_with("--num-rollout", "10"))
    metrics = {"time/step_seconds": 40.0, "grad_norm": 0.25, "loss/policy": -0.0, "reward/mean": 0.5, "lr": 1.0}
    metrics |= {"entropy": 1.25, "tokens_per_second": 812.4, "loss/kl": 0.0123}
    shown = "reward 0.500, KL to the start 0.0123, entropy 1.250, gradient norm 0.25, tokens/s 812, seconds 40.0"
    for step in (1, 2):
        view.on_progress(_row(step, step, metrics))
    view.on_progress(_row(2, 3, {"eval/sums": 0.5, "eval_length/sums": 3.0}))
    assert view.unread() == [
        f"step 1/10: {shown}",
        f"step 2/10: {shown}, about 5 min left",
        "evaluation after step 2: sums 0.500",
    ]


def test_a_resumed_run_does_not_say_its_old_steps_again(load_with) -> None:
    view = view_of(load_with("--num-rollout", "9"), resumed_step=2)
    now = int(time.time())
    for step, when in ((1, now - 900), (2, now - 800), (3, now + 60)):
        view.on_progress(_row(step, when, {"reward/mean": 0.5, "time/step_seconds": 100.0}))
    assert [line.partition(":")[0] for line in view.unread()] == ["step 3/9"]
    assert view.summary()[0].startswith("finished 1 steps after the 2 of earlier starts in")


@pytest.mark.parametrize(("saved", "code", "said"), [(3, 0, "finished 3 of 3 steps"), (2, 1, "hold 2 of 3 steps")])
def test_the_status_of_a_run_that_has_ended(
    load_with, tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: int, code: int, said: str
) -> None:
    run = ended_run(load_with, tmp_path, saved)
    assert main(["status", str(run.path)]) == code
    printed = capsys.readouterr().out
    assert said in printed
    assert "does not answer" not in printed


def test_the_status_lists_checkpoints_with_the_scorers_that_paid(
    load_with, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_run(load_with, tmp_path, 3)
    earlier = run.path / "checkpoints" / "step-00000002"
    earlier.mkdir()
    (earlier / "manifest.json").write_text(json.dumps({"manifest": {"scored_by": {"f1 headrace sha256:ab": 64}}}))
    assert main(["status", str(run.path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "step-" in line]
    assert rows == [["step-00000002", "64", "f1", "headrace", "sha256:ab"], ["step-00000003", "–"]]


def test_the_same_command_on_a_finished_run_says_so_at_once(
    load_with, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_run(load_with, tmp_path, 3)
    assert main(["train", str(job_file), "--run-dir", str(tmp_path), "--num-rollout", "3"]) == 0
    assert f"{run.path} has finished 3 of 3 steps" in capsys.readouterr().out


def test_the_status_of_a_service_that_is_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    (run.logs / "rollout.log").write_text('{"event": "engine_starting"}\n')
    run.write_services({"rollout": ServiceEntry("127.0.0.1:1", None, os.getpid())})
    assert main(["status", str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "does not serve yet, last: engine starting" in printed


def test_a_changed_batch_size_is_refused_before_anything_is_checked_or_started(
    load_with, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_run(load_with, tmp_path, 2)
    (run.ledger / "state.sqlite").touch()
    words = ["--run-dir", str(tmp_path), "--num-rollout", "3", "--rollout-batch-size", "8", "--global-batch-size", "32"]
    assert main(["train", str(job_file), *words]) == 1
    said = capsys.readouterr()
    assert "was started with --rollout-batch-size 4, and its ledger has groups of that kind; now it is 8" in said.err
    assert "checking" not in said.out


def ended_run(load_with, folder: Path, saved: int) -> RunFolder:
    job = load_with("--run-dir", str(folder), "--num-rollout", "3")
    run = RunFolder(folder / job.run.run_name)
    run.create(job)
    run.write_services({name: ServiceEntry("127.0.0.1:1", None, 2**22 + 1) for name in ("buffer", "trainer")})
    (run.path / "checkpoints" / f"step-{saved:08}").mkdir(parents=True)
    return run


def test_the_view_renders_from_the_first_moment_on(load_with) -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = view_of(load_with())
    console.print(view)
    waiting = trainer_pb2.PHASE_WAITING
    view.on_status(trainer_pb2.GetStatusResponse(phase=waiting, step=2, num_steps=9, groups_per_step=4))
    view.on_fleet(rollout_pb2.GetFleetResponse(engines=[rollout_pb2.Engine(state=rollout_pb2.ENGINE_STATE_READY)]))
    view.note("rollout ready after 3 s")
    console.print(view)
    text = console.export_text()
    for part in ("starting", "2/9  waiting", "0/4 ready", "1/1 engines ready", "rollout ready after 3 s"):
        assert part in text


def _row(step: int, time: int, metrics: dict[str, float]) -> trainer_pb2.WatchProgressResponse:
    return trainer_pb2.WatchProgressResponse(step=step, time=Timestamp(seconds=time), metrics=metrics)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sam", "samples"),
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
