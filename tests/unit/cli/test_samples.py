"""`headrace samples`: of a run that lives and of one that has ended."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Failure
from tests.support.ledgers.answers import answered

MEGABYTE = 1 << 20


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Three steps of two samples, and one that failed."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    run.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    log = SampleLog(run.samples)
    for step in (1, 2, 3):
        answers = [
            Answer.of(
                answered(f"g{step}/0", "apples and", f" pears {step}", group_id=f"g{step}", reward=step / 10), step
            ),
            Answer.of(answered(f"g{step}/1", "apples and", f" plums {step}", group_id=f"g{step}", reward=-step), step),
        ]
        log.write_step(step, 0, answers, MEGABYTE)
    failed = answered("g9/0", "apples and", " [bold]\x1b[2J", group_id="g9", failure=Failure("SCORER_RAISED", "'x'"))
    log.write_untrained(log.new_untrained_file(), [Answer.of(failed)], MEGABYTE)
    return run


def ids(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["samples", "--json", *words]) == 0
    return [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_has_ended_still_shows_its_samples(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "-n", "2", "one"]) == 0
    printed = capsys.readouterr().out
    assert "step 3, g3/0, completed, 3 + 2 tokens, policy version 1 [0:2]" in printed
    assert "prompt:\napples and\nresponse:\n pears 3\nreward 0.3 by math 7" in printed
    assert "step 2" not in printed
    assert "1 samples failed" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "2"], ["g2/0", "g2/1"]),
        (["--group", "g1"], ["g1/0", "g1/1"]),
        (["--best", "-n", "2"], ["g3/0", "g2/0"]),
        (["--worst", "-n", "1"], ["g3/1"]),
        (["--search", "PLUMS 1"], ["g1/1"]),
        (["--failed"], ["g9/0"]),
        (["--step", "7"], []),
    ],
)
def test_samples_by_step_group_reward_and_text(
    words: list[str], expected: list[str], ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids(capsys, *words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--eval"], ["e4/sums", "e4/aime", "e0/sums"]),
        (["--eval", "sums"], ["e4/sums", "e0/sums"]),
        (["--eval", "--step", "0"], ["e0/sums"]),
        (["--eval", "sums", "--best", "-n", "1"], ["e4/sums"]),
        ([], ["g3/0", "g3/1", "g2/0", "g2/1", "g1/0"]),
    ],
)
def test_the_samples_of_evaluations_are_shown_by_step_and_data_set(
    words: list[str], expected: list[str], ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SampleLog(ended.samples)
    for step, names in ((0, ["sums"]), (4, ["sums", "aime"])):
        answers = [
            Answer.of(answered(f"e{step}/{name}", group_id=f"eval/{name}/0", reward=float(step)), step)
            for name in names
        ]
        log.write_evaluated(step, answers, MEGABYTE, is_new=True)
    assert ids(capsys, *words) == expected


def test_what_is_not_there_is_said(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--step", "7"]) == 0
    assert "no such sample in runs/one: steps 1 to 3 have samples" in capsys.readouterr().out


def test_a_model_cannot_steer_the_terminal(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--failed"]) == 0
    printed = capsys.readouterr().out
    assert "[bold]␛[2J" in printed
    assert "\x1b" not in printed
    assert "failed: SCORER_RAISED: 'x'" in printed


needs_inspect = pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed")


@needs_inspect
def test_inspect_opens_a_log_of_each_step_and_one_of_untrained_samples(ended: RunFolder, tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    turns = [{"role": role, "content": f"{role} said"} for role in ("system", "user", "assistant", "tool", "assistant")]
    sample = Answer.of(answered("g4/1", group_id="g4", label="4", reward_parts={"form": 0.5}), 4)
    SampleLog(ended.samples).write_step(4, 0, [replace(sample, index=1, turns=turns)], MEGABYTE)
    assert main(["samples", "one", "--to", "inspect", "logs"]) == 0
    logs = {file.stem: read_eval_log(str(file)) for file in Path("logs").iterdir()}
    assert sorted(logs) == ["step-0000001", "step-0000002", "step-0000003", "step-0000004", "untrained"]
    third, fourth = logs["step-0000003"], logs["step-0000004"].samples[0]
    assert [(each.id, each.epoch) for each in third.samples] == [("g3", 1), ("g3", 2)]
    assert [message.text for message in third.samples[0].messages] == ["apples and", " pears 3"]
    assert [each.scores["reward"].value for each in third.samples] == [0.3, -3.0]
    assert third.results.scores[0].metrics["mean"].value == pytest.approx(-1.35)
    assert (fourth.id, fourth.epoch, fourth.target) == ("g4", 2, "4")
    assert [(message.role, message.text) for message in fourth.messages] == [
        (turn["role"], turn["content"]) for turn in turns
    ]
    score = fourth.scores["reward"].metadata
    assert score == {"scorer": "math", "scorer_version": "7", "form": 0.5}
    assert fourth.metadata["policy_ranges"] == [[1, 0, 2]]
    (failed,) = logs["untrained"].samples
    assert "SCORER_RAISED" in failed.error.message
    assert not failed.scores


@needs_inspect
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "2"], {"step-0000002": ["g2", "g2"]}),
        (["--best", "-n", "2"], {"step-0000003": ["g3"], "step-0000002": ["g2"]}),
        (["--search", "PLUMS 1"], {"step-0000001": ["g1"]}),
        (["--failed"], {"untrained": ["g9"]}),
        (["--eval"], {"eval-0000004": ["eval/sums/0"]}),
        (["--step", "7"], {}),
    ],
)
def test_an_export_has_the_samples_that_were_asked_for(
    words: list[str], expected: dict[str, list[str]], ended: RunFolder
) -> None:
    from inspect_ai.log import read_eval_log

    evaluated = Answer.of(answered("e4", group_id="eval/sums/0"), 4)
    SampleLog(ended.samples).write_evaluated(4, [evaluated], MEGABYTE, is_new=True)
    assert main(["samples", "one", "--to", "inspect", "logs", *words]) == 0
    logs = {file.stem: [each.id for each in read_eval_log(str(file)).samples] for file in Path("logs").glob("*")}
    assert logs == expected


@needs_inspect
def test_the_page_of_inspect_has_the_logs_in_it(ended: RunFolder) -> None:
    assert main(["samples", "one", "--step", "2", "--html", "page"]) == 0
    assert Path("page/index.html").is_file()
    assert [file.name for file in Path("page").rglob("*.eval")] == ["step-0000002.eval"]


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "inspect", "logs", "--json"],
        ["--to", "inspect", "logs", "--best"],
        ["--to", "inspect", "logs", "--buffer-address", "127.0.0.1:1"],
        ["--to", "parquet", "logs"],
        ["--html", "runs"],
    ],
)
def test_what_makes_no_export_is_refused(words: list[str], ended: RunFolder) -> None:
    assert main(["samples", *words]) == 2
    assert not Path("logs").exists()


def test_without_inspect_its_extra_is_named(
    ended: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.inspect_logs.find_spec", lambda name: None)
    assert main(["samples", "--to", "inspect", "logs"]) != 0
    assert "headrace[inspect]" in capsys.readouterr().err
